/* multiring's C interface. Native operations of frameworks call it from any thread, without Python.

   `multiring._frontend.requests.entry()` returns a capsule named MULTIRING_ENTRY_NAME that holds a MultiringEntry. The
   entry is valid as long as the process lives. Before `init` and after `shutdown` every request fails. */
#ifndef MULTIRING_ENTRY_H
#define MULTIRING_ENTRY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MULTIRING_ENTRY_NAME "multiring.entry"
#define MULTIRING_ENTRY_VERSION 1

enum {
  MULTIRING_ALL_REDUCE = 0,     /* combines each array over the ranks; the result has the array's shape */
  MULTIRING_BROADCAST = 1,      /* returns the root's arrays */
  MULTIRING_ALL_GATHER = 2,     /* concatenates the rows of all ranks; the ranks' row counts may differ */
  MULTIRING_ALL_TO_ALL = 3,     /* sends rows from every rank to every rank, according to `splits` */
  MULTIRING_REDUCE_SCATTER = 4, /* combines the arrays and returns this rank's rows: n / ranks of n rows, and one more
                                   on the first n % ranks ranks */
  MULTIRING_BARRIER = 5         /* waits for all ranks; it takes no arrays */
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

/* The result of a request: success, or a kind of multiring's errors. */
enum {
  MULTIRING_OK = 0,
  MULTIRING_ARGUMENT = 1,
  MULTIRING_MISMATCH = 2,  /* the ranks made different requests; the inputs are intact */
  MULTIRING_PEER_LOST = 3,
  MULTIRING_STALL = 4,
  MULTIRING_STATE = 5,     /* before init, after shutdown, in a fork */
  MULTIRING_UNSUPPORTED = 6,
  MULTIRING_CANCELLED = 7,
  MULTIRING_INTERNAL = 8
};

typedef struct MultiringArray {
  const void* input; /* row-major; must stay valid and unchanged from `start` until `done`; multiring only reads it */
  void* output;      /* row-major; NULL: multiring calls `allocate` once it knows the shape */
  const int64_t* shape;
  int32_t dims;
} MultiringArray;

typedef struct MultiringRequest {
  uint32_t size;       /* the caller's sizeof(MultiringRequest) */
  int32_t process_set; /* number of the process set; 0: all ranks */
  int32_t collective;
  int32_t type;        /* element type of all arrays */
  int32_t op;          /* ALL_REDUCE, REDUCE_SCATTER: the reduction */
  int32_t root;        /* BROADCAST: a rank of the whole job */
  double prescale;     /* ALL_REDUCE, REDUCE_SCATTER: factor of the inputs; otherwise 1 */
  double postscale;    /* ALL_REDUCE, REDUCE_SCATTER: factor of the results; otherwise 1 */
  const char* name;    /* the ranks match requests by name; NULL: they match unnamed requests by their order */
  const char* wire;    /* encoding of float32 between hosts, such as "bf16"; NULL: no compression. BARRIER: if not NULL,
                          why this rank cannot take part in an operation, which then fails on all ranks: `root` is its
                          collective, `name` its name, and `arrays` its arrays, whose memory is not used */
  const MultiringArray* arrays;
  int32_t count;       /* number of arrays; they form one operation */
  int32_t has_splits;
  const int64_t* splits; /* ALL_TO_ALL: number of rows for each rank of the set */
  int32_t split_count;
  int32_t wants_rows;  /* ALL_GATHER, ALL_TO_ALL: if not 0, multiring also calls `allocate` for array count + i. This
                          int64 array receives the number of rows of array i from each rank. */
  /* Returns memory for a result of this shape, or NULL if there is none. multiring may call it on any thread. */
  void* (*allocate)(void* data, int32_t array, const int64_t* shape, int32_t dims);
  /* multiring calls this function once for every request, on any thread, possibly before `start` returns. `text`
     explains `error`; it is valid only during the call. */
  void (*done)(void* data, int32_t error, const char* text);
  void* data;
} MultiringRequest;

typedef struct MultiringEntry {
  uint32_t version; /* MULTIRING_ENTRY_VERSION; an entry with another version has an incompatible interface */
  uint32_t size;    /* sizeof(MultiringEntry); later versions append members */
  void* self;       /* pass it as the first argument of the functions below */
  /* Submits a request. Copies `request` and everything that it points to, except the arrays' memory. Returns the
     request's number, or 0 if the request has already failed. In that case `done` has been called, unless it is NULL
     or `size` is too small for this version. */
  uint64_t (*start)(void* self, const MultiringRequest* request);
  /* Fails a request on all its ranks. The process set is unusable afterwards. Returns 0 if the request had ended. */
  int32_t (*cancel)(void* self, uint64_t number);
  /* Cancels all requests in flight, and returns their number. */
  uint64_t (*cancel_all)(void* self);
} MultiringEntry;

#ifdef __cplusplus
}
#endif
#endif
