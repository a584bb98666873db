/* A user of native/entry/multiring.h, like a framework's operations. It starts requests on its own threads. It uses
   Python only to check that these threads never hold the GIL. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "multiring.h"

typedef struct Asked {
  const MultiringEntry* entry;
  MultiringRequest request;
  uint64_t number;
  int ended; /* number of calls of `done` */
  int error;
  char text[4096];
  int64_t shapes[8][4];
  int32_t dims[8];
  void* results[8];
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pthread_t thread;
} Asked;

static int (*holds_gil)(void);
static int gil_was_held;

static void look(void) {
  if (holds_gil()) __atomic_add_fetch(&gil_was_held, 1, __ATOMIC_SEQ_CST);
}

static void on_done(void* data, int32_t error, const char* text) {
  Asked* asked = data;
  look();
  pthread_mutex_lock(&asked->mutex);
  ++asked->ended;
  asked->error = error;
  snprintf(asked->text, sizeof asked->text, "%s", text);
  pthread_cond_broadcast(&asked->changed);
  pthread_mutex_unlock(&asked->mutex);
}

static void* on_allocate(void* data, int32_t array, const int64_t* shape, int32_t dims) {
  Asked* asked = data;
  size_t bytes = 8; /* the size of the largest type used here */
  look();
  asked->dims[array] = dims;
  for (int32_t i = 0; i < dims; ++i) {
    asked->shapes[array][i] = shape[i];
    bytes *= (size_t)shape[i];
  }
  return asked->results[array] = calloc(bytes ? bytes : 1, 1);
}

static void* run(void* data) {
  Asked* asked = data;
  look();
  asked->number = asked->entry->start(asked->entry->self, &asked->request);
  return NULL;
}

void user_set_up(int (*question)(void)) { holds_gil = question; }
int user_gil_was_held(void) { return gil_was_held; }

/* Starts a request on a new thread. `shapes` has `dims` numbers for each of the `count` arrays. */
Asked* user_start(const MultiringEntry* entry, int32_t collective, int32_t type, int32_t op, int32_t process_set, const char* name, int32_t count,
                  void* const* inputs, void* const* outputs, const int64_t* shapes, int32_t dims) {
  Asked* asked = calloc(1, sizeof *asked);
  MultiringArray* arrays = calloc((size_t)count, sizeof *arrays);
  pthread_mutex_init(&asked->mutex, NULL);
  pthread_cond_init(&asked->changed, NULL);
  for (int32_t i = 0; i < count; ++i) {
    arrays[i].input = inputs[i];
    arrays[i].output = outputs[i];
    arrays[i].shape = shapes + (size_t)i * (size_t)dims;
    arrays[i].dims = dims;
  }
  asked->entry = entry;
  asked->request.size = sizeof asked->request;
  asked->request.process_set = process_set;
  asked->request.collective = collective;
  asked->request.type = type;
  asked->request.op = op;
  asked->request.prescale = asked->request.postscale = 1;
  asked->request.name = name;
  asked->request.arrays = arrays;
  asked->request.count = count;
  asked->request.wants_rows = collective == MULTIRING_ALL_GATHER;
  asked->request.allocate = on_allocate;
  asked->request.done = on_done;
  asked->request.data = asked;
  pthread_create(&asked->thread, NULL, run, asked);
  pthread_join(asked->thread, NULL);
  free(arrays); /* `start` has copied them */
  return asked;
}

int user_cancel(Asked* asked) { return asked->entry->cancel(asked->entry->self, asked->number); }

/* Waits for the end of a request and returns its error. */
int user_wait(Asked* asked) {
  pthread_mutex_lock(&asked->mutex);
  while (!asked->ended) pthread_cond_wait(&asked->changed, &asked->mutex);
  pthread_mutex_unlock(&asked->mutex);
  return asked->error;
}

int user_ended(Asked* asked) { return asked->ended; }
const char* user_text(Asked* asked) { return asked->text; }
void* user_result(Asked* asked, int32_t array) { return asked->results[array]; }
int64_t user_rows(Asked* asked, int32_t array) { return asked->shapes[array][0]; }
