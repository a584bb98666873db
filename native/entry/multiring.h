/* multiring's entry for native code: the operations of frameworks call it, from any thread, without Python.

   A capsule named MULTIRING_ENTRY_NAME holds a MultiringEntry; `multiring.frontend.requests.entry()` returns it. It is
   valid as long as the process lives, also outside `init` and `shutdown`, where every request fails. */
#ifndef MULTIRING_ENTRY_H
#define MULTIRING_ENTRY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MULTIRING_ENTRY_NAME "multiring.entry"
#define MULTIRING_ENTRY_VERSION 1

enum {
  MULTIRING_ALL_REDUCE = 0,     /* one result of each array's shape, combined over the ranks */
  MULTIRING_BROADCAST = 1,      /* the root's arrays */
  MULTIRING_ALL_GATHER = 2,     /* every rank's rows, one after the other; ranks may differ in rows */
  MULTIRING_ALL_TO_ALL = 3,     /* rows from every rank to every rank, as `splits` says */
  MULTIRING_REDUCE_SCATTER = 4, /* this rank's rows of the arrays combined: n / ranks, the first n % ranks one more */
  MULTIRING_BARRIER = 5         /* no arrays */
};

enum {
  MULTIRING_BOOL = 0,
  MULTIRING_INT8 = 1,
  MULTIRING_INT16 = 2,
  MULTIRING_INT32 = 3,
  MULTIRING_INT64 = 4,
  MULTIRING_UINT8 = 5,
  MULTIRING_UINT16 = 6,
  MULTIRING_UINT32 = 7,
  MULTIRING_UINT64 = 8,
  MULTIRING_FLOAT16 = 9,
  MULTIRING_BFLOAT16 = 10,
  MULTIRING_FLOAT32 = 11,
  MULTIRING_FLOAT64 = 12,
  MULTIRING_COMPLEX64 = 13,
  MULTIRING_COMPLEX128 = 14
};

enum {
  MULTIRING_AVERAGE = 0,
  MULTIRING_SUM = 1,
  MULTIRING_ADASUM = 2,
  MULTIRING_MIN = 3,
  MULTIRING_MAX = 4,
  MULTIRING_PRODUCT = 5
};

/* What a request ended with: multiring's errors, by kind. */
enum {
  MULTIRING_OK = 0,
  MULTIRING_ARGUMENT = 1,
  MULTIRING_MISMATCH = 2,  /* the ranks asked for different things; inputs are intact */
  MULTIRING_PEER_LOST = 3,
  MULTIRING_STALL = 4,
  MULTIRING_STATE = 5,     /* before init, after shutdown, in a fork */
  MULTIRING_UNSUPPORTED = 6,
  MULTIRING_CANCELLED = 7,
  MULTIRING_INTERNAL = 8
};

typedef struct MultiringArray {
  const void* input; /* row-major, `start` to `done`; it is only read */
  void* output;      /* row-major; NULL: asked of `allocate` once its shape is known */
  const int64_t* shape;
  int32_t dims;
} MultiringArray;

typedef struct MultiringRequest {
  uint32_t size;       /* sizeof(MultiringRequest), as the caller knows it */
  int32_t process_set; /* its number; 0: all ranks */
  int32_t collective;
  int32_t type;        /* of all arrays */
  int32_t op;          /* of ALL_REDUCE and REDUCE_SCATTER */
  int32_t root;        /* of BROADCAST: a rank of the whole job */
  double prescale;     /* factors of ALL_REDUCE and REDUCE_SCATTER; 1 elsewhere */
  double postscale;
  const char* name;    /* what the ranks match it by; NULL: the order in which they come to such requests */
  const char* wire;    /* how float32 travels between hosts: "fp16", "bf16", "int8"; NULL: as it is */
  const MultiringArray* arrays;
  int32_t count;       /* of arrays, combined as one */
  int32_t has_splits;
  const int64_t* splits; /* of ALL_TO_ALL, rows to each rank of the set */
  int32_t split_count;
  int32_t wants_rows;  /* ALL_GATHER, ALL_TO_ALL: `allocate` is asked for array count + i too: int64, how many rows of
                          array i came from each rank */
  /* Returns memory for a result of this shape, NULL where there is none. On any thread. */
  void* (*allocate)(void* data, int32_t array, const int64_t* shape, int32_t dims);
  /* Called once for every request, on any thread, also before `start` returns; `text` says what `error` means and is
     valid while it runs. */
  void (*done)(void* data, int32_t error, const char* text);
  void* data;
} MultiringRequest;

typedef struct MultiringEntry {
  uint32_t version; /* MULTIRING_ENTRY_VERSION; another one is another interface */
  uint32_t size;    /* sizeof(MultiringEntry); what is added later comes behind */
  void* self;
  /* Copies `request` and all that it points to but the arrays' memory. Returns its number; 0 where it has failed
     already, which `done` was told, unless there is none or `size` is too small for this version. */
  uint64_t (*start)(void* self, const MultiringRequest* request);
  /* Has a request fail, on all its ranks; the set cannot be used any more. 0: it had ended. */
  int32_t (*cancel)(void* self, uint64_t number);
  /* As `cancel`, of all requests in flight; returns how many there were. */
  uint64_t (*cancel_all)(void* self);
} MultiringEntry;

#ifdef __cplusplus
}
#endif
#endif
