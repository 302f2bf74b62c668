/* SPDX-License-Identifier: MIT */
/*
 * A worker in C11 for parents that use gpuloan.py: it takes tensors, does jobs and answers with tensors of its own.
 *
 *   cc -std=c11 worker.c -o worker $(pkg-config --cflags --libs gpuloan) -ldl
 *
 * The parent starts it with `parent.spawn(["./worker"])` and passes its socket as GPULOAN_FD. What the job is stands in the user bytes
 * of the loan (docs/python.md has the format of the metadata):
 *
 *   echo                     a result with the loan's bytes, shape, strides and dtype
 *   halves                   two results: the first and the second half of the loan's elements
 *   check SEED               int64[2]: how many elements differ from the test pattern of SEED, how many there are
 *   fill SEED DTYPE SHAPE    a result of that dtype and shape ("2,3"), filled with the test pattern of SEED
 *   die                      ends at once, as a crash would
 *
 * Test pattern: element i, in row-major order, is (31 i + SEED) % 65521 % 17, which every dtype here can express.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <gpuloan/gpuloan.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TIMEOUT_MS = 30000, DIMENSIONS = 8, USER = 256, PERIOD = 65521, PIECE = PERIOD * 256 }; /* PIECE: elements at once */
#define TRY(call) do { if ((call) != GPULOAN_OK) return failed(gpuloan_error_text()); } while (0)
#define DRIVER(call) do { int code_ = (call); if (code_ != 0) return failed_call(#call, code_); } while (0)

struct header { /* of the metadata; int64 shape[ndim], strides[ndim] (elements), offset (bytes) and the user bytes follow */
  char magic[4];
  uint8_t dtype_code, dtype_bits; /* DLPack's */
  uint16_t ndim;
  uint32_t user_bytes, flags;
};
struct tensor {
  struct header head;
  int64_t shape[DIMENSIONS], strides[DIMENSIONS], offset;
  char user[USER + 1];
};
static const struct { const char *name; uint8_t code, bits; } dtypes[] = {
    {"uint8", 1, 8}, {"int64", 0, 64}, {"float32", 2, 32}, {"bfloat16", 4, 16}, {"float8_e4m3fn", 10, 8}};

static char reason[512];
static bool failed(const char *text) { return snprintf(reason, sizeof reason, "%s", text), false; }
static bool failed_call(const char *call, int code) { return snprintf(reason, sizeof reason, "%s: CUresult %d", call, code), false; }

/* ---- The driver, opened as gpuloan opened it: this program needs no CUDA toolkit ---- */

static int (*init)(unsigned), (*device_get)(int *, int), (*retain)(void **, int), (*set_current)(void *), (*stream_create)(void **, unsigned),
    (*synchronize)(void *), (*to_host)(void *, uint64_t, size_t, void *), (*to_device)(uint64_t, const void *, size_t, void *),
    (*on_device)(uint64_t, uint64_t, size_t, void *);
static void *stream;

static bool open_driver(void) {
  gpuloan_driver_info info = GPULOAN_INIT(gpuloan_driver_info);
  TRY(gpuloan_driver_probe(NULL, &info));
  void *library = dlopen(info.path, RTLD_NOW), *context;
  const struct { const char *name; void *place; } entries[] = {
      {"cuInit", &init}, {"cuDeviceGet", &device_get}, {"cuDevicePrimaryCtxRetain", &retain}, {"cuCtxSetCurrent", &set_current},
      {"cuStreamCreate", &stream_create}, {"cuStreamSynchronize", &synchronize}, {"cuMemcpyDtoHAsync_v2", &to_host},
      {"cuMemcpyHtoDAsync_v2", &to_device}, {"cuMemcpyDtoDAsync_v2", &on_device}};
  for (size_t i = 0; library != NULL && i < sizeof entries / sizeof *entries; ++i) {
    void *symbol = dlsym(library, entries[i].name);
    if (symbol == NULL) return failed(dlerror());
    memcpy(entries[i].place, &symbol, sizeof symbol);
  }
  if (library == NULL) return failed(dlerror());
  int device;
  DRIVER(init(0));
  DRIVER(device_get(&device, 0));
  DRIVER(retain(&context, device));
  DRIVER(set_current(context));
  DRIVER(stream_create(&stream, 1)); /* non-blocking */
  return true;
}

/* ---- Tensors ---- */

static uint64_t elements(const struct tensor *t) {
  uint64_t count = 1;
  for (unsigned i = 0; i < t->head.ndim; ++i) count *= (uint64_t)t->shape[i];
  return count;
}

static uint64_t itemsize(const struct tensor *t) { return t->head.dtype_bits / 8u; }

static bool contiguous(const struct tensor *t) {
  int64_t step = 1;
  for (unsigned i = t->head.ndim; i-- > 0; step *= t->shape[i])
    if (t->shape[i] != 1 && t->strides[i] != step) return false;
  return true;
}

static void make_contiguous(struct tensor *t) {
  int64_t step = 1;
  for (unsigned i = t->head.ndim; i-- > 0; step *= t->shape[i]) t->strides[i] = step;
  t->offset = 0;
}

static struct tensor describe(uint8_t code, uint8_t bits, unsigned ndim, const int64_t *shape, const char *user) {
  struct tensor t = {.head = {"GLT1", code, bits, (uint16_t)ndim, 0, 0}};
  memcpy(t.shape, shape, ndim * sizeof *shape);
  snprintf(t.user, sizeof t.user, "%s", user);
  make_contiguous(&t);
  return t;
}

static bool parse(const void *metadata, size_t bytes, struct tensor *t) {
  const char *from = metadata;
  memset(t, 0, sizeof *t);
  if (bytes < sizeof t->head) return failed("the loan has no tensor's metadata");
  memcpy(&t->head, from, sizeof t->head);
  size_t list = t->head.ndim * sizeof(int64_t);
  if (memcmp(t->head.magic, "GLT1", 4) != 0 || t->head.ndim > DIMENSIONS || t->head.user_bytes > USER ||
      bytes < sizeof t->head + 2 * list + 8 + t->head.user_bytes)
    return failed("the loan's metadata is not one that this worker knows");
  memcpy(t->shape, from += sizeof t->head, list);
  memcpy(t->strides, from += list, list);
  memcpy(&t->offset, from += list, 8);
  memcpy(t->user, from + 8, t->head.user_bytes);
  return true;
}

static size_t write_metadata(struct tensor *t, char *to) {
  size_t list = t->head.ndim * sizeof(int64_t), user = t->head.user_bytes = (uint32_t)strlen(t->user);
  memcpy(to, &t->head, sizeof t->head);
  memcpy(to + sizeof t->head, t->shape, list);
  memcpy(to + sizeof t->head + list, t->strides, list);
  memcpy(to + sizeof t->head + 2 * list, &t->offset, 8);
  memcpy(to + sizeof t->head + 2 * list + 8, t->user, user);
  return sizeof t->head + 2 * list + 8 + user;
}

/* Asks for a result like `t` of `bytes`; on success it is acquired and *view may be written until gpuloan_loan_done. */
static bool request(gpuloan_peer *parent, struct tensor *t, uint64_t bytes, gpuloan_loan **loan, gpuloan_view *view) {
  char metadata[GPULOAN_METADATA_MAX];
  gpuloan_request_options options = GPULOAN_INIT(gpuloan_request_options);
  options.bytes = bytes, options.metadata = metadata, options.metadata_bytes = write_metadata(t, metadata);
  *view = GPULOAN_INIT(gpuloan_view);
  TRY(gpuloan_request_send(parent, &options, loan));
  gpuloan_status status = gpuloan_loan_acquire(*loan, TIMEOUT_MS, view);
  if (status == GPULOAN_OK) return true;
  failed(gpuloan_error_text());
  gpuloan_loan_unref(*loan);
  return false;
}

/* Ends the result: done behind the stream's work, or failed. */
static bool finish(gpuloan_loan *loan, bool good) {
  if (good && gpuloan_loan_done(loan, stream) != GPULOAN_OK) good = failed(gpuloan_error_text());
  if (!good) gpuloan_loan_fail(loan, reason);
  gpuloan_loan_unref(loan);
  return good;
}

static bool send_copy(gpuloan_peer *parent, struct tensor *t, uint64_t from, uint64_t bytes) {
  gpuloan_loan *loan;
  gpuloan_view view;
  if (!request(parent, t, bytes, &loan, &view)) return false;
  int code = bytes == 0 ? 0 : on_device(view.pointer, from, bytes, stream);
  return finish(loan, code == 0 || failed_call("cuMemcpyDtoDAsync", code));
}

/* ---- The test pattern ---- */

static uint32_t encode(unsigned value, uint8_t code) {
  float real = (float)value;
  uint32_t bits;
  memcpy(&bits, &real, sizeof bits);
  if (code == 2) return bits;
  if (code == 4) return bits >> 16;
  if (code != 10 || value == 0) return value;
  unsigned exponent = 4; /* e4m3fn: value = 2^exponent * (1 + mantissa / 8), and 16 is the largest */
  while (value >> exponent == 0) --exponent;
  return (exponent + 7) << 3 | ((value * 8) >> exponent) % 8;
}

/* The caller's, by malloc: the first `count` elements, of which any piece of PIECE elements of a larger tensor is a copy. */
static char *make_pattern(const struct tensor *t, unsigned seed, uint64_t count) {
  uint32_t codes[17];
  char *pattern = malloc(count * itemsize(t) + 1);
  for (unsigned v = 0; v < 17; ++v) codes[v] = encode(v, t->head.dtype_code);
  for (uint64_t i = 0; pattern != NULL && i < count; ++i)
    memcpy(pattern + i * itemsize(t), &codes[(31 * i + seed) % PERIOD % 17], itemsize(t)); /* little endian */
  return pattern;
}

/* How many of `count` items at `seen`, the elements from `first` on, differ from the pattern. */
static uint64_t differ(const char *seen, const char *pattern, uint64_t first, uint64_t count, uint64_t size) {
  uint64_t wrong = 0;
  const char *wanted = pattern + first % PIECE * size;
  if (memcmp(seen, wanted, count * size) == 0) return 0;
  for (uint64_t i = 0; i < count; ++i) wrong += memcmp(seen + i * size, wanted + i * size, size) != 0;
  return wrong;
}

/* The items of a view, in row-major order of its indices. */
static void gather(const struct tensor *t, const char *span, char *to) {
  for (uint64_t i = 0, count = elements(t), size = itemsize(t); i < count; ++i) {
    int64_t at = 0;
    uint64_t left = i;
    for (unsigned d = t->head.ndim; d-- > 0; left /= (uint64_t)t->shape[d]) at += (int64_t)(left % (uint64_t)t->shape[d]) * t->strides[d];
    memcpy(to + i * size, span + t->offset + at * (int64_t)size, size);
  }
}

static bool count_wrong(const struct tensor *t, const gpuloan_view *view, unsigned seed, int64_t out[2]) {
  uint64_t total = elements(t), size = itemsize(t), at_once = total < PIECE ? total : PIECE;
  bool plain = contiguous(t), good = true;
  uint64_t start = plain ? view->pointer + (uint64_t)t->offset : view->pointer, room = plain ? at_once * size : view->bytes;
  char *pattern = make_pattern(t, seed, plain ? at_once : total), *seen = malloc(room + 1), *gathered = malloc(plain ? 1 : total * size + 1);
  out[0] = 0, out[1] = (int64_t)total;
  if (pattern == NULL || seen == NULL || gathered == NULL) good = failed("out of memory");
  for (uint64_t done = 0; good && done < total; done += at_once) {
    uint64_t count = !plain ? total : total - done < at_once ? total - done : at_once;
    int code = to_host(seen, start + done * size, plain ? count * size : view->bytes, stream);
    if (code == 0) code = synchronize(stream);
    if (code != 0) good = failed_call("cuMemcpyDtoHAsync", code);
    if (!good) break;
    if (!plain) gather(t, seen, gathered);
    out[0] += (int64_t)differ(plain ? seen : gathered, pattern, plain ? done : 0, count, size);
    if (!plain) break;
  }
  free(pattern), free(seen), free(gathered);
  return good;
}

static bool job_check(gpuloan_peer *parent, const struct tensor *t, const gpuloan_view *view) {
  int64_t answer[2], two = 2;
  struct tensor result = describe(0, 64, 1, &two, "check");
  gpuloan_loan *loan;
  gpuloan_view place;
  if (!count_wrong(t, view, (unsigned)strtoul(t->user + 5, NULL, 10), answer)) return false;
  if (!request(parent, &result, sizeof answer, &loan, &place)) return false;
  int code = to_device(place.pointer, answer, sizeof answer, stream);
  if (code == 0) code = synchronize(stream);
  return finish(loan, code == 0 || failed_call("cuMemcpyHtoDAsync", code));
}

static bool fill(const struct tensor *t, uint64_t pointer, unsigned seed) {
  uint64_t total = elements(t) * itemsize(t), piece = PIECE * itemsize(t), first = total < piece ? total : piece;
  char *pattern = make_pattern(t, seed, first / itemsize(t));
  int code = 0;
  if (pattern == NULL) return failed("out of memory");
  if (first > 0) code = to_device(pointer, pattern, first, stream);
  for (uint64_t done = first; code == 0 && done < total; done += piece) /* the pattern repeats from piece to piece */
    code = on_device(pointer + done, pointer, total - done < piece ? total - done : piece, stream);
  if (code == 0) code = synchronize(stream); /* before `pattern` goes */
  free(pattern);
  return code == 0 || failed_call("a copy of the pattern", code);
}

static bool job_fill(gpuloan_peer *parent, const char *user) {
  unsigned seed, ndim = 0;
  char name[32], list[128], answer[32];
  int64_t shape[DIMENSIONS];
  if (sscanf(user, "fill %u %31s %127s", &seed, name, list) != 3) return failed("not 'fill SEED DTYPE SHAPE'");
  for (char *at = list; *at != '\0' && ndim < DIMENSIONS; at += *at == ',') shape[ndim++] = strtoll(at, &at, 10);
  snprintf(answer, sizeof answer, "fill %u", seed);
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; ++i) {
    if (strcmp(name, dtypes[i].name) != 0) continue;
    struct tensor result = describe(dtypes[i].code, dtypes[i].bits, ndim, shape, answer);
    gpuloan_loan *loan;
    gpuloan_view place;
    if (!request(parent, &result, elements(&result) * itemsize(&result), &loan, &place)) return false;
    return finish(loan, fill(&result, place.pointer, seed));
  }
  return failed("a dtype that this worker does not know");
}

static bool job_halves(gpuloan_peer *parent, const struct tensor *t, const gpuloan_view *view) {
  int64_t count = (int64_t)elements(t), first = count / 2, second = count - first;
  if (!contiguous(t)) return failed("halves are taken of contiguous tensors");
  struct tensor one = describe(t->head.dtype_code, t->head.dtype_bits, 1, &first, "halves 0");
  struct tensor two = describe(t->head.dtype_code, t->head.dtype_bits, 1, &second, "halves 1");
  uint64_t start = view->pointer + (uint64_t)t->offset, bytes = (uint64_t)first * itemsize(t);
  return send_copy(parent, &one, start, bytes) && send_copy(parent, &two, start + bytes, (uint64_t)second * itemsize(t));
}

static bool job(gpuloan_peer *parent, gpuloan_loan *loan) {
  gpuloan_view view = GPULOAN_INIT(gpuloan_view);
  struct tensor t;
  TRY(gpuloan_loan_acquire(loan, TIMEOUT_MS, &view));
  if (!parse(view.metadata, view.metadata_bytes, &t)) return false;
  if (strcmp(t.user, "die") == 0) raise(SIGKILL);
  if (strcmp(t.user, "halves") == 0) return job_halves(parent, &t, &view);
  if (strncmp(t.user, "check ", 6) == 0) return job_check(parent, &t, &view);
  if (strncmp(t.user, "fill ", 5) == 0) return job_fill(parent, t.user);
  if (strcmp(t.user, "echo") == 0) return send_copy(parent, &t, view.pointer, view.bytes); /* strides and offset as they came */
  return failed("no job of this worker's");
}

int main(void) {
  gpuloan_context_options options = GPULOAN_INIT(gpuloan_context_options);
  gpuloan_context *context;
  gpuloan_peer *parent;
  const char *fd = getenv("GPULOAN_FD");
  if (fd == NULL) return fprintf(stderr, "GPULOAN_FD is not set: this program is started by a parent that uses gpuloan.py\n"), 2;
  options.role = GPULOAN_ROLE_IMPORTER;
  if (!open_driver()) return fprintf(stderr, "%s\n", reason), 1;
  if (gpuloan_context_create(&options, &context) != GPULOAN_OK || gpuloan_context_adopt(context, atoi(fd), TIMEOUT_MS, &parent) != GPULOAN_OK)
    return fprintf(stderr, "%s\n", gpuloan_error_text()), 1;
  for (;;) {
    gpuloan_event event = GPULOAN_INIT(gpuloan_event);
    gpuloan_status status = gpuloan_context_next_event(context, TIMEOUT_MS, &event);
    if (status != GPULOAN_OK && status != GPULOAN_ERR_TIMEOUT) return fprintf(stderr, "%s\n", gpuloan_error_text()), 1;
    if (event.type == GPULOAN_EVENT_LOAN_OFFERED) finish(event.loan, job(parent, event.loan));
    if (event.type != GPULOAN_EVENT_PEER_LOST) continue;
    bool ended = event.status == GPULOAN_ERR_PEER_LOST; /* it closed the connection, or died: no work is left either way */
    if (!ended) fprintf(stderr, "the parent is gone: %s\n", event.text);
    gpuloan_context_destroy(context);
    return ended ? 0 : 1;
  }
}
