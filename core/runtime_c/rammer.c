/* The implementation of rammer.h: a reader of compiled files, and the calls of two drivers.
 *
 * A compiled file is a zip of stored members (core/rammer/compiled/artifact.py). The record "calls" of its machine code has the
 * memory to allocate, its contents, the launches and the ports (core/rammer/device/driver_calls.py). Every number of it is checked
 * before it is used. Kernels cannot be checked: they run only if the caller trusts the file. */
#define _POSIX_C_SOURCE 200809L
#include "rammer.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FORMAT = 10, DEEPEST = 64, MOST_VARIANTS = 64, MOST_RANK = 24, LONGEST_LINE = 16384, HEX_DIGEST = 64 };
/* Largest size in bytes, and the value after which the counters of repeated launches are reset. */
static const int64_t LARGEST = (int64_t)1 << 40, RESET_AFTER = 1 << 30;

static __thread char last_error[1024];

const char *rammer_error(void) { return last_error; }

static rammer_status fail(rammer_status status, const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(last_error, sizeof last_error, format, values);
  va_end(values);
  return status;
}

#define TRY(call)                                                    \
  do {                                                               \
    rammer_status status_ = (call);                                  \
    if (status_) return status_;                                     \
  } while (0)

/* ---- Memory that lives as long as its pool ---- */

typedef struct block {
  struct block *next;
} block;

/* Return zeroed memory, or NULL after a failure was reported. */
static void *take(block **pool, size_t count, size_t size) {
  block *made = NULL;
  if (!size || count <= (SIZE_MAX - sizeof(block)) / size) made = calloc(1, sizeof(block) + count * size + 1);
  if (!made) {
    fail(RAMMER_NO_MEMORY, "out of memory: %zu items of %zu bytes", count, size);
    return NULL;
  }
  made->next = *pool;
  *pool = made;
  return made + 1;
}

static void free_pool(block *pool) {
  while (pool) {
    block *next = pool->next;
    free(pool);
    pool = next;
  }
}

/* ---- Checksums ---- */

static uint32_t crc32_of(const unsigned char *data, size_t size) {
  uint32_t table[256], value = 0xFFFFFFFFu;
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  for (size_t i = 0; i < size; ++i) value = table[(value ^ data[i]) & 255] ^ (value >> 8);
  return value ^ 0xFFFFFFFFu;
}

typedef struct {
  uint32_t state[8];
  uint64_t length;
  unsigned char rest[64];
} sha256;

static const uint32_t SHA_ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

static void sha_block(sha256 *s, const unsigned char *p) {
  uint32_t w[64], v[8];
  for (int i = 0; i < 16; ++i, p += 4) w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
  for (int i = 16; i < 64; ++i) {
    uint32_t a = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
    uint32_t b = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  memcpy(v, s->state, sizeof v);
  for (int i = 0; i < 64; ++i) {
    uint32_t a = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
    uint32_t b = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
    uint32_t one = v[7] + a + ((v[4] & v[5]) ^ (~v[4] & v[6])) + SHA_ROUNDS[i] + w[i];
    uint32_t two = b + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
    memmove(v + 1, v, 7 * sizeof v[0]);
    v[4] += one;
    v[0] = one + two;
  }
  for (int i = 0; i < 8; ++i) s->state[i] += v[i];
}

static void sha_begin(sha256 *s) {
  static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(s->state, first, sizeof first);
  s->length = 0;
}

static void sha_add(sha256 *s, const void *data, size_t size) {
  const unsigned char *p = data;
  for (; size; --size) {
    s->rest[s->length++ % 64] = *p++;
    if (s->length % 64 == 0) {
      sha_block(s, s->rest);
      for (; size > 64; size -= 64, p += 64, s->length += 64) sha_block(s, p);
    }
  }
}

static void sha_hex(sha256 *s, char hex[HEX_DIGEST + 1]) {
  unsigned char end[8];
  uint64_t bits = s->length * 8;
  for (int i = 0; i < 8; ++i) end[i] = (unsigned char)(bits >> (56 - 8 * i));
  sha_add(s, "\x80", 1);
  while (s->length % 64 != 56) sha_add(s, "", 1);
  sha_add(s, end, 8);
  for (int i = 0; i < 8; ++i) snprintf(hex + 8 * i, 9, "%08x", s->state[i]);
}

/* ---- JSON ---- */

typedef enum { NOTHING, OTHER, NUMBER, TEXT, LIST, OBJECT } json_kind;

typedef struct json {
  json_kind kind;
  const char *key;
  int64_t number;
  const char *text;
  size_t count;
  struct json *first, *next;
} json;

static const json MISSING = {0};

typedef struct {
  block **pool;
  const char *at, *end;
} json_text;

static void skip_space(json_text *t) {
  while (t->at < t->end && (*t->at == ' ' || *t->at == '\n' || *t->at == '\r' || *t->at == '\t')) ++t->at;
}

static int hex_value(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; }

/* Return a string without its quotes as UTF-8, or NULL. The cursor is at the first quote. */
static const char *read_string(json_text *t) {
  const char *from = ++t->at;
  while (t->at < t->end && *t->at != '"') t->at += *t->at == '\\' && t->at + 1 < t->end ? 2 : 1;
  if (t->at >= t->end) return NULL;
  char *made = take(t->pool, (size_t)(t->at - from) + 1, 1), *to = made;
  if (!made) return NULL;
  for (; from < t->at; ++from) {
    if ((unsigned char)*from < 32) return NULL;
    if (*from != '\\') {
      *to++ = *from;
      continue;
    }
    static const char escapes[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *found = strchr(escapes, *++from);
    if (*from && found) {
      *to++ = values[found - escapes];
      continue;
    }
    if (*from != 'u' || t->at - from < 5) return NULL;
    unsigned code = 0;
    for (int i = 0; i < 4; ++i) {
      int digit = hex_value(*++from);
      if (digit < 0) return NULL;
      code = code * 16 + (unsigned)digit;
    }
    if (!code) return NULL;
    if (code >= 0x800) *to++ = (char)(0xE0 | code >> 12), *to++ = (char)(0x80 | (code >> 6 & 63)), *to++ = (char)(0x80 | (code & 63));
    else if (code >= 0x80) *to++ = (char)(0xC0 | code >> 6), *to++ = (char)(0x80 | (code & 63));
    else *to++ = (char)code;
  }
  ++t->at;
  return made;
}

static json *read_value(json_text *t, int depth);

static int read_items(json_text *t, json *into, int depth) {
  char close = into->kind == LIST ? ']' : '}';
  json **last = &into->first;
  ++t->at;
  skip_space(t);
  if (t->at < t->end && *t->at == close) return ++t->at, 1;
  for (;;) {
    const char *key = NULL;
    skip_space(t);
    if (into->kind == OBJECT) {
      if (t->at >= t->end || *t->at != '"' || !(key = read_string(t))) return 0;
      skip_space(t);
      if (t->at >= t->end || *t->at++ != ':') return 0;
    }
    json *item = read_value(t, depth + 1);
    if (!item) return 0;
    item->key = key;
    *last = item;
    last = &item->next;
    ++into->count;
    skip_space(t);
    if (t->at >= t->end) return 0;
    if (*t->at == close) return ++t->at, 1;
    if (*t->at++ != ',') return 0;
  }
}

/* Return the next value, or NULL if it is malformed. Fractions are OTHER: no record that is read has one. */
static json *read_value(json_text *t, int depth) {
  skip_space(t);
  if (t->at >= t->end || depth > DEEPEST) return NULL;
  json *made = take(t->pool, 1, sizeof *made);
  if (!made) return NULL;
  if (*t->at == '"') {
    made->kind = TEXT;
    return (made->text = read_string(t)) ? made : NULL;
  }
  if (*t->at == '[' || *t->at == '{') {
    made->kind = *t->at == '[' ? LIST : OBJECT;
    return read_items(t, made, depth) ? made : NULL;
  }
  const char *from = t->at;
  while (t->at < t->end && !strchr(",]} \n\r\t", *t->at)) ++t->at;
  size_t length = (size_t)(t->at - from);
  char word[32] = "", *end;
  if (!length) return NULL;
  made->kind = OTHER;
  if (length < sizeof word) {
    memcpy(word, from, length);
    errno = 0;
    made->number = strtoll(word, &end, 10);
    if (!*end && !errno) made->kind = NUMBER;
  }
  return made;
}

static const json *get(const json *object, const char *key) {
  if (object->kind == OBJECT)
    for (const json *item = object->first; item; item = item->next)
      if (!strcmp(item->key, key)) return item;
  return &MISSING;
}

static const json *at(const json *list, size_t index) {
  const json *item = list->kind == LIST ? list->first : NULL;
  while (item && index--) item = item->next;
  return item ? item : &MISSING;
}

static const char *text_of(const json *value) { return value->kind == TEXT ? value->text : ""; }

/* Return a number between two bounds; otherwise report what is malformed, and return the lower bound. */
static int64_t number_of(const json *value, int64_t low, int64_t high, rammer_status *status) {
  if (value->kind == NUMBER && value->number >= low && value->number <= high) return value->number;
  *status = fail(RAMMER_BAD_FILE, "the record of the calls is malformed: a number is missing or out of range");
  return low;
}

/* ---- The zip ---- */

typedef struct {
  const char *name;
  const unsigned char *data;
  size_t size;
  uint32_t checksum;
} member;

typedef struct {
  block *pool;
  const unsigned char *data;
  size_t size, members;
  member *member;
  int variants;
  const json *heads[MOST_VARIANTS];
} file;

static uint32_t u16(const unsigned char *p) { return p[0] | (uint32_t)p[1] << 8; }
static uint32_t u32(const unsigned char *p) { return u16(p) | u16(p + 2) << 16; }

static rammer_status damaged(const char *why) { return fail(RAMMER_BAD_FILE, "not a compiled file, or a damaged one: %s", why); }

static rammer_status read_file(file *f, const char *path) {
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat about;
  if (fd < 0) return fail(RAMMER_BAD_FILE, "%s: %s", path, strerror(errno));
  unsigned char *data = NULL;
  size_t have = 0;
  if (fstat(fd, &about) || !S_ISREG(about.st_mode)) {
    close(fd);
    return fail(RAMMER_BAD_FILE, "%s is not a regular file", path);
  }
  if ((data = take(&f->pool, (size_t)about.st_size, 1))) {
    while (have < (size_t)about.st_size) {
      ssize_t got = read(fd, data + have, (size_t)about.st_size - have);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      have += (size_t)got;
    }
  }
  close(fd);
  if (!data) return RAMMER_NO_MEMORY;
  f->data = data;
  f->size = have;
  return have == (size_t)about.st_size ? RAMMER_OK : fail(RAMMER_BAD_FILE, "%s: %s", path, "it changed while it was read");
}

static int compare_members(const void *a, const void *b) { return strcmp(((const member *)a)->name, ((const member *)b)->name); }

/* Read the directory at the end of the file: members are stored, each once, and within the file. */
static rammer_status read_directory(file *f, const unsigned char **comment, size_t *comment_size) {
  enum { END = 22, ENTRY = 46, LOCAL = 30, LONGEST_COMMENT = 65535 };
  const unsigned char *end = NULL;
  for (size_t back = END; back <= f->size && back <= END + LONGEST_COMMENT && !end; ++back) {
    const unsigned char *p = f->data + f->size - back;
    if (u32(p) == 0x06054b50 && u16(p + 20) == back - END) end = p;
  }
  if (!end) return damaged("it has no directory");
  size_t count = u16(end + 10), start = u32(end + 16), place = (size_t)(end - f->data), total = 0;
  if (count == 0xFFFF || start == 0xFFFFFFFFu) return fail(RAMMER_UNSUPPORTED, "files of more than 4 GiB or 65,534 members are read by Python only");
  if (start > place) return damaged("its directory is outside the file");
  *comment = end + END;
  *comment_size = u16(end + 20);
  if (!(f->member = take(&f->pool, count, sizeof(member)))) return RAMMER_NO_MEMORY;
  const unsigned char *p = f->data + start;
  for (f->members = 0; f->members < count; ++f->members) {
    if ((size_t)(end - p) < ENTRY || u32(p) != 0x02014b50) return damaged("its directory is malformed");
    size_t name = u16(p + 28), skip = ENTRY + name + u16(p + 30) + u16(p + 32), size = u32(p + 24), local = u32(p + 42);
    if ((size_t)(end - p) < skip) return damaged("its directory is malformed");
    if (size == 0xFFFFFFFFu || local == 0xFFFFFFFFu) return fail(RAMMER_UNSUPPORTED, "members of 4 GiB and more are read by Python only");
    if (u16(p + 10) || size != u32(p + 20)) return damaged("a member is compressed");
    if (u16(p + 8) & 0x61 || u16(p + 6) > 63) return damaged("a member is encrypted or of another kind");
    if (local > place || place - local < LOCAL || u32(f->data + local) != 0x04034b50) return damaged("a member is outside the file");
    size_t data = local + LOCAL + u16(f->data + local + 26) + u16(f->data + local + 28);
    if (data > place || place - data < size || (total += size) > f->size) return damaged("a member is outside the file");
    char *copy = take(&f->pool, name + 1, 1);
    if (!copy) return RAMMER_NO_MEMORY;
    memcpy(copy, p + ENTRY, name);
    if (strlen(copy) != name) return damaged("the name of a member is malformed");
    for (size_t i = 0; i < name; ++i)
      if (copy[i] < 32 || copy[i] > 126) return damaged("the name of a member is malformed");
    if (u16(f->data + local + 26) != name || memcmp(f->data + local + LOCAL, copy, name)) return damaged("a member has two names");
    f->member[f->members] = (member){copy, f->data + data, size, u32(p + 16)};
    p += skip;
  }
  qsort(f->member, f->members, sizeof(member), compare_members);
  for (size_t i = 1; i < f->members; ++i)
    if (!strcmp(f->member[i - 1].name, f->member[i].name)) return damaged("two members have one name");
  return RAMMER_OK;
}

static const member *find_member(const file *f, const char *name) {
  member wanted = {name, NULL, 0, 0};
  return f->members ? bsearch(&wanted, f->member, f->members, sizeof wanted, compare_members) : NULL;
}

static rammer_status find_json(file *f, const char *name, const json **found) {
  const member *m = find_member(f, name);
  if (!m) return fail(RAMMER_BAD_FILE, "not a compiled file, or a damaged one: member %s is missing", name);
  json_text text = {&f->pool, (const char *)m->data, (const char *)m->data + m->size};
  json *made = read_value(&text, 0);
  skip_space(&text);
  if (!made || text.at != text.end) return fail(RAMMER_BAD_FILE, "not a compiled file, or a damaged one: %s is malformed", name);
  *found = made;
  return RAMMER_OK;
}

static void member_name(char *into, size_t size, int variant, const char *rest) {
  if (variant) snprintf(into, size, "v%d/%s", variant, rest);
  else snprintf(into, size, "%s", rest);
}

/* Compare the seal at the end of the file, a digest of all members but blocks of constants, which have checksums. */
static rammer_status check_seal(const file *f, const unsigned char *comment, size_t size) {
  static const char before[] = "rammer ", blocks[] = "constants";
  char line[512], hex[HEX_DIGEST + 1];
  sha256 s;
  sha_begin(&s);
  for (size_t i = 0; i < f->members; ++i) {
    const member *m = &f->member[i];
    size_t length = strlen(m->name);
    if (length >= sizeof blocks - 1 && !strcmp(m->name + length - (sizeof blocks - 1), blocks)) continue;
    if (length > 255) return damaged("the name of a member is malformed");
    if (crc32_of(m->data, m->size) != m->checksum) return damaged("the checksum of a member differs");
    int used = snprintf(line, sizeof line, "%zu %s %zu ", length, m->name, m->size);
    sha_add(&s, line, (size_t)used);
    sha_add(&s, m->data, m->size);
  }
  sha_hex(&s, hex);
  if (size < sizeof before - 1 + HEX_DIGEST || memcmp(comment, before, sizeof before - 1) || memcmp(comment + sizeof before - 1, hex, HEX_DIGEST))
    return damaged("its digest differs from its content");
  return RAMMER_OK;
}

static rammer_status open_file(file *f, const char *path) {
  const unsigned char *comment;
  size_t size;
  rammer_status status = RAMMER_OK;
  TRY(read_file(f, path));
  TRY(read_directory(f, &comment, &size));
  TRY(check_seal(f, comment, size));
  TRY(find_json(f, "head.json", &f->heads[0]));
  int64_t format = number_of(get(f->heads[0], "format"), 0, 1 << 20, &status);
  if (!status && format != FORMAT)
    return fail(RAMMER_UNSUPPORTED, "the file has format %d, this program reads format %d: compile the model again", (int)format, FORMAT);
  f->variants = (int)number_of(get(f->heads[0], "variants"), 1, MOST_VARIANTS, &status);
  TRY(status);
  for (int n = 1; n < f->variants; ++n) {
    char name[64];
    member_name(name, sizeof name, n, "head.json");
    TRY(find_json(f, name, &f->heads[n]));
  }
  return RAMMER_OK;
}

/* ---- Drivers ---- */

typedef enum { NO_DRIVER, CUDA, OPENCL } driver_kind;
typedef uint64_t handle; /* a pointer or an address of the driver */

typedef struct {
  void *library;
  int (*get_platforms)(uint32_t, void **, uint32_t *);
  int (*platform_info)(void *, uint32_t, size_t, void *, size_t *);
  int (*get_devices)(void *, uint64_t, uint32_t, void **, uint32_t *);
  int (*device_info)(void *, uint32_t, size_t, void *, size_t *);
  void *(*create_context)(const intptr_t *, uint32_t, void *const *, void *, void *, int *);
  void *(*create_queue)(void *, void *, uint64_t, int *);
  void *(*create_buffer)(void *, uint64_t, size_t, void *, int *);
  void *(*create_program)(void *, uint32_t, void *const *, const size_t *, const unsigned char *const *, int *, int *);
  int (*build)(void *, uint32_t, void *const *, const char *, void *, void *);
  void *(*create_kernel)(void *, const char *, int *);
  int (*set_argument)(void *, uint32_t, size_t, const void *);
  int (*enqueue)(void *, void *, uint32_t, const size_t *, const size_t *, const size_t *, uint32_t, void *, void *);
  int (*write)(void *, void *, uint32_t, size_t, size_t, const void *, uint32_t, void *, void *);
  int (*read)(void *, void *, uint32_t, size_t, size_t, void *, uint32_t, void *, void *);
  int (*fill)(void *, void *, const void *, size_t, size_t, size_t, uint32_t, void *, void *);
  int (*copy)(void *, void *, void *, size_t, size_t, size_t, uint32_t, void *, void *);
  int (*finish)(void *);
  int (*free_buffer)(void *), (*free_kernel)(void *), (*free_program)(void *), (*free_queue)(void *), (*free_context)(void *);
} opencl;

typedef struct {
  void *library;
  int (*init)(unsigned), (*count)(int *), (*device)(int *, int), (*attribute)(int *, int, int);
  int (*retain)(void **, int), (*release)(int), (*push)(void *), (*pop)(void **);
  int (*allocate)(uint64_t *, size_t), (*free)(uint64_t), (*set)(uint64_t, unsigned char, size_t);
  int (*write)(uint64_t, const void *, size_t), (*read)(void *, uint64_t, size_t);
  int (*load)(void **, const void *), (*unload)(void *), (*function)(void **, void *, const char *), (*limit)(void *, int, int);
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
  int (*finish)(void *);
} cuda;

typedef struct {
  const char *name;
  size_t place; /* of the function's pointer in the struct */
} symbol;

static const symbol OPENCL_SYMBOLS[] = {
    {"clGetPlatformIDs", offsetof(opencl, get_platforms)},   {"clGetPlatformInfo", offsetof(opencl, platform_info)},
    {"clGetDeviceIDs", offsetof(opencl, get_devices)},       {"clGetDeviceInfo", offsetof(opencl, device_info)},
    {"clCreateContext", offsetof(opencl, create_context)},   {"clCreateCommandQueue", offsetof(opencl, create_queue)},
    {"clCreateBuffer", offsetof(opencl, create_buffer)},     {"clCreateProgramWithBinary", offsetof(opencl, create_program)},
    {"clBuildProgram", offsetof(opencl, build)},             {"clCreateKernel", offsetof(opencl, create_kernel)},
    {"clSetKernelArg", offsetof(opencl, set_argument)},      {"clEnqueueNDRangeKernel", offsetof(opencl, enqueue)},
    {"clEnqueueWriteBuffer", offsetof(opencl, write)},       {"clEnqueueReadBuffer", offsetof(opencl, read)},
    {"clEnqueueFillBuffer", offsetof(opencl, fill)},         {"clFinish", offsetof(opencl, finish)},
    {"clReleaseMemObject", offsetof(opencl, free_buffer)},   {"clReleaseKernel", offsetof(opencl, free_kernel)},
    {"clReleaseProgram", offsetof(opencl, free_program)},    {"clReleaseCommandQueue", offsetof(opencl, free_queue)},
    {"clReleaseContext", offsetof(opencl, free_context)},    {"clEnqueueCopyBuffer", offsetof(opencl, copy)},
    {NULL, 0}};
static const symbol CUDA_SYMBOLS[] = {
    {"cuInit", offsetof(cuda, init)},                          {"cuDeviceGetCount", offsetof(cuda, count)},
    {"cuDeviceGet", offsetof(cuda, device)},                   {"cuDeviceGetAttribute", offsetof(cuda, attribute)},
    {"cuDevicePrimaryCtxRetain", offsetof(cuda, retain)},      {"cuDevicePrimaryCtxRelease_v2", offsetof(cuda, release)},
    {"cuCtxPushCurrent_v2", offsetof(cuda, push)},             {"cuCtxPopCurrent_v2", offsetof(cuda, pop)},
    {"cuMemAlloc_v2", offsetof(cuda, allocate)},               {"cuMemFree_v2", offsetof(cuda, free)},
    {"cuMemsetD8_v2", offsetof(cuda, set)},                    {"cuMemcpyHtoD_v2", offsetof(cuda, write)},
    {"cuMemcpyDtoH_v2", offsetof(cuda, read)},                 {"cuModuleLoadData", offsetof(cuda, load)},
    {"cuModuleUnload", offsetof(cuda, unload)},                {"cuModuleGetFunction", offsetof(cuda, function)},
    {"cuFuncSetAttribute", offsetof(cuda, limit)},             {"cuLaunchKernel", offsetof(cuda, launch)},
    {"cuStreamSynchronize", offsetof(cuda, finish)},           {NULL, 0}};

/* The drivers stay loaded until the process ends, since they do not support unloading. */
static rammer_status load_driver(void *into, void **library, const char *name, const symbol *symbols) {
  *library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
  if (!*library) return fail(RAMMER_NO_DEVICE, "%s", dlerror());
  for (; symbols->name; ++symbols) {
    void *found = dlsym(*library, symbols->name);
    if (!found) return fail(RAMMER_NO_DEVICE, "%s has no %s", name, symbols->name);
    memcpy((char *)into + symbols->place, &found, sizeof found);
  }
  return RAMMER_OK;
}

/* ---- The model ---- */

typedef enum { BUFFER, ADDRESS, INT32, INT64, RUN_NUMBER, LAUNCH_NUMBER, MOVED, TURNS, SKIPPED } argument_kind;
static const char *const ARGUMENTS[] = {"buffer", "address", "int32", "int64", "epoch", "launch", "moved", "turns", "skipped"};

typedef struct {
  argument_kind kind;
  int64_t number; /* of a buffer, or the value */
  int64_t place;
} argument;

typedef struct {
  size_t bytes;
  handle handle;
} buffer;

typedef struct {
  void *handle, *module;
  int local_bytes;
} kernel;

typedef struct {
  size_t kernel, groups, threads, count;
  argument *arguments;
} launch;

/* A sum of an offset and of lengths, each times a factor. */
typedef struct {
  int64_t offset, *factors;
  size_t count, *lengths;
} extent;

/* A length of a range: that of a dimension, or the product of factors over a divisor, rounded down. Programs read it as a tensor. */
typedef struct {
  const char *name, *tensor;
  int64_t low, high, step, now, divisor;
  size_t count;
  extent *factors; /* NULL for a dimension */
} length;

/* A tensor that enters the model, leaves it, or connects two programs. */
typedef struct {
  const char *tensor;
  rammer_port port;   /* its name is NULL between programs; its extents are those of the current lengths */
  int64_t *whole;     /* the extents in the programs' memory */
  extent *dims;       /* the extents as functions of lengths, or NULL */
  const length *scalar; /* the length whose value it holds, or NULL */
  int known, is_input, is_written, is_read;
  void *bound;        /* the caller's array */
  unsigned char *own; /* an array with whole extents that later programs read, or NULL */
} value;

/* The place of a value in a program's memory. */
typedef struct {
  size_t value;
  int64_t buffer, place, *strides;
  int dense;
  size_t span;
} placed;

/* A copy between the iterations of a loop: first byte and step of target and source, number of bytes, and the ends of both. */
typedef struct {
  int64_t to, to_by, from, from_by, bytes, to_end, from_end;
} move;

enum { ONCE, FIRST, BEFORE, AFTER, LAST, TIMES };

/* A program for all lengths, or for short ones. */
typedef struct {
  size_t buffers, kernels, launches, count[2];
  buffer *buffer;
  kernel *kernel;
  launch *launch;
  placed *ports[2];
  void *program;
  int repeated, loops, in_kernel;
  int64_t done_buffer, done_place, done_by, most_launches, epoch, launched, moved;
  int64_t turns, steps, step, memory;        /* of a loop: its iterations, the offset of the number of steps, and steps per iteration */
  size_t terms, moves[TIMES];
  int64_t *factors, *term_buffers, *term_places; /* of the lengths that the number of steps depends on */
  move *move[TIMES];
} table;

/* A segment of the model. Table n + 1 runs up to until[n] of a length, table 0 beyond. */
typedef struct {
  size_t tables, selector;
  table *table;
  int64_t *until;
} segment;

struct rammer_model {
  block *pool;
  file file; /* freed when the model is open */
  driver_kind kind;
  opencl cl;
  cuda cu;
  void *device, *context, *queue;
  int cu_device, cu_retained, check_only, broken;
  size_t segments, values, room, lengths, count[2];
  segment *segment;
  value *value;
  length *length;
  rammer_port *ports[2];
  size_t *port_values[2];
};

static rammer_status check_call(const rammer_model *m, int code, const char *what) {
  if (!code) return RAMMER_OK;
  return fail(RAMMER_DEVICE_FAILED, "%s failed: %s error %d", what, m->kind == CUDA ? "CUDA" : "OpenCL", code);
}

static rammer_status clear_buffer(rammer_model *m, buffer *b) {
  static const unsigned char zero[4] = {0};
  if (m->kind == CUDA) return check_call(m, m->cu.set(b->handle, 0, b->bytes), "clearing device memory");
  return check_call(m, m->cl.fill(m->queue, (void *)(uintptr_t)b->handle, zero, sizeof zero, 0, (b->bytes + 3) / 4 * 4, 0, NULL, NULL), "clearing device memory");
}

static rammer_status allocate(rammer_model *m, buffer *b) {
  int code = 0;
  if (m->kind == CUDA) {
    code = m->cu.allocate(&b->handle, b->bytes);
  } else {
    b->handle = (handle)(uintptr_t)m->cl.create_buffer(m->context, 1 /* CL_MEM_READ_WRITE */, (b->bytes + 3) / 4 * 4, NULL, &code);
  }
  TRY(check_call(m, code, "allocating device memory"));
  return clear_buffer(m, b);
}

static rammer_status write_bytes(rammer_model *m, const buffer *b, int64_t place, const void *data, size_t bytes) {
  if (!bytes) return RAMMER_OK;
  int code = m->kind == CUDA ? m->cu.write(b->handle + (uint64_t)place, data, bytes)
                             : m->cl.write(m->queue, (void *)(uintptr_t)b->handle, 1, (size_t)place, bytes, data, 0, NULL, NULL);
  return check_call(m, code, "copying to the device");
}

static rammer_status read_bytes(rammer_model *m, const buffer *b, int64_t place, void *data, size_t bytes) {
  if (!bytes) return RAMMER_OK;
  int code = m->kind == CUDA ? m->cu.read(data, b->handle + (uint64_t)place, bytes)
                             : m->cl.read(m->queue, (void *)(uintptr_t)b->handle, 1, (size_t)place, bytes, data, 0, NULL, NULL);
  return check_call(m, code, "copying from the device");
}

/* Append a text of the driver without spaces at its ends, and a space. */
static void append_info(int (*info)(void *, uint32_t, size_t, void *, size_t *), void *of, uint32_t key, char *line) {
  char found[512] = "";
  if (info(of, key, sizeof found - 1, found, NULL)) found[0] = 0;
  char *from = found, *end = found + strlen(found);
  while (*from == ' ') ++from;
  while (end > from && end[-1] == ' ') *--end = 0;
  size_t used = strlen(line);
  snprintf(line + used, LONGEST_LINE - used, "%s ", from);
}

static int compare_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Write the vector extensions of this x86 processor, sorted, as the device's plugin names them. */
static void cpu_extensions(char *into, size_t size) {
  static const char *const begins[] = {"avx", "amx", "fma", "f16c", "bmi", "sse"};
  static const size_t kinds = sizeof begins / sizeof begins[0];
  char line[LONGEST_LINE], *words[512], *rest = NULL;
  size_t count = 0, used = 0;
  FILE *cpus = fopen("/proc/cpuinfo", "r");
  into[0] = 0;
  if (!cpus) return;
  while (fgets(line, sizeof line, cpus)) {
    if (strncmp(line, "flags", 5) || !strchr(line, ':')) continue;
    for (char *word = strtok_r(strchr(line, ':') + 1, " \t\n", &rest); word; word = strtok_r(NULL, " \t\n", &rest))
      for (size_t k = 0; k < kinds; ++k)
        if (!strncmp(word, begins[k], strlen(begins[k])) && count < 512) words[count++] = word;
    break;
  }
  fclose(cpus);
  qsort(words, count, sizeof words[0], compare_text);
  for (size_t i = 0; i < count && used < size; ++i) {
    if (i && !strcmp(words[i], words[i - 1])) continue;
    used += (size_t)snprintf(into + used, size - used, used ? " %s" : "%s", words[i]);
  }
}

static int begins_with(const char *text, const char *start) { return !strncmp(text, start, strlen(start)); }

/* Return 1 if the machine code's target names this device: the architecture of an AMD GPU, whose programs are launches; else its driver
 * and, on a CPU, its vector extensions. */
static int fits_opencl(const rammer_model *m, void *platform, void *device, const char *code) {
  enum { PLATFORM_NAME = 0x902, PLATFORM_VERSION = 0x901, NAME = 0x102B, VERSION = 0x102F, DRIVER = 0x102D, TYPE = 0x1000, IS_CPU = 2 };
  char line[LONGEST_LINE] = "", end[LONGEST_LINE];
  uint64_t type = 0;
  append_info(m->cl.device_info, device, NAME, line);
  size_t length = strcspn(line, ": ");
  if (begins_with(line, "gfx") && !strncmp(code, line, length) && !strcmp(code + length, " waves 256")) return 1;
  line[0] = 0;
  append_info(m->cl.platform_info, platform, PLATFORM_NAME, line);
  append_info(m->cl.platform_info, platform, PLATFORM_VERSION, line);
  append_info(m->cl.device_info, device, NAME, line);
  append_info(m->cl.device_info, device, VERSION, line);
  append_info(m->cl.device_info, device, DRIVER, line);
  if (!begins_with(code, line)) return 0;
  if (m->cl.device_info(device, TYPE, sizeof type, &type, NULL) || !(type & IS_CPU)) return 1;
  cpu_extensions(line, sizeof line);
  snprintf(end, sizeof end, " 1 %.*s", (int)(sizeof end - 8), line);
  size_t a = strlen(code), b = strlen(end);
  return a >= b && !strcmp(code + a - b, end);
}

static rammer_status open_opencl(rammer_model *m, const char *code) {
  enum { MOST = 16 };
  void *platforms[MOST], *devices[MOST];
  uint32_t platform_count = 0, device_count = 0;
  if (!m->cl.library) TRY(load_driver(&m->cl, &m->cl.library, "libOpenCL.so.1", OPENCL_SYMBOLS));
  m->cl.get_platforms(MOST, platforms, &platform_count);
  for (uint32_t p = 0; p < platform_count && p < MOST && !m->device; ++p) {
    if (m->cl.get_devices(platforms[p], 0xFFFFFFFFu, MOST, devices, &device_count)) continue;
    for (uint32_t d = 0; d < device_count && d < MOST && !m->device; ++d)
      if (fits_opencl(m, platforms[p], devices[d], code)) m->device = devices[d];
  }
  if (!m->device) return fail(RAMMER_NO_DEVICE, "no OpenCL device here runs the machine code for %s", code);
  int status = 0;
  m->kind = OPENCL;
  m->context = m->cl.create_context(NULL, 1, &m->device, NULL, NULL, &status);
  TRY(check_call(m, status, "creating a context"));
  m->queue = m->cl.create_queue(m->context, m->device, 0, &status);
  return check_call(m, status, "creating a queue");
}

static rammer_status open_cuda(rammer_model *m, const char *code) {
  enum { MAJOR = 75, MINOR = 76 };
  int count = 0, major = 0, minor = 0;
  char name[64];
  if (!m->cu.library) TRY(load_driver(&m->cu, &m->cu.library, "libcuda.so.1", CUDA_SYMBOLS));
  if (m->cu.init(0) || m->cu.count(&count)) return fail(RAMMER_NO_DEVICE, "the CUDA driver does not start");
  for (int index = 0; index < count; ++index) {
    if (m->cu.device(&m->cu_device, index) || m->cu.attribute(&major, MAJOR, m->cu_device) || m->cu.attribute(&minor, MINOR, m->cu_device)) continue;
    snprintf(name, sizeof name, "sm_%d%d", major, minor);
    if (!begins_with(code, name) || (code[strlen(name)] && strcmp(code + strlen(name), "a"))) continue;
    m->kind = CUDA;
    TRY(check_call(m, m->cu.retain(&m->context, m->cu_device), "opening the GPU"));
    m->cu_retained = 1;
    return RAMMER_OK;
  }
  return fail(RAMMER_NO_DEVICE, "no GPU here runs the machine code for %s", code);
}

/* Choose the first variant for a device here; with check_only, the first variant with machine code. */
static rammer_status choose_variant(rammer_model *m, const char *wanted, int *variant) {
  rammer_status status = fail(RAMMER_UNSUPPORTED, "the file has no machine code%s%s: compile the model with --target", wanted ? " for device " : "", wanted ? wanted : "");
  for (*variant = 0; *variant < m->file.variants; ++*variant) {
    const json *head = m->file.heads[*variant];
    const char *device = text_of(get(head, "device")), *code = text_of(get(head, "code"));
    size_t length = strcspn(device, ":");
    if (wanted && (strlen(wanted) != length || strncmp(wanted, device, length))) continue;
    int is_cuda = length == 4 && !strncmp(device, "cuda", 4), is_opencl = length == 4 && !strncmp(device, "rocm", 4);
    if (!*code || !(is_cuda || is_opencl)) continue;
    if (m->check_only) return m->kind = is_cuda ? CUDA : OPENCL, RAMMER_OK;
    status = is_cuda ? open_cuda(m, code) : open_opencl(m, code);
    if (status != RAMMER_NO_DEVICE) return status;
  }
  return status;
}

/* ---- Reading a variant ---- */

/* The table that is read: its calls, and where its constants and arrays are. */
typedef struct {
  rammer_model *model;
  table *table;
  int variant;
  char block[64], code_block[64];
  const json *calls, *constants, *arrays;
} source;

static const char *const TYPES[] = {"bool", "int8", "uint8", "float16", "int16", "uint16", "float32", "int32", "uint32", "float64", "int64", "uint64"};
static const int TYPE_BYTES[] = {1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8};

static rammer_status malformed(const char *what) { return fail(RAMMER_BAD_FILE, "the record of the calls is malformed: %s", what); }

/* Find the bytes of a constant or an array of the machine code, and compare their checksum. */
static rammer_status find_array(const source *s, int is_constant, const char *name, const unsigned char **data, size_t *bytes) {
  const json *index = is_constant ? s->constants : s->arrays, *row = index->kind == LIST ? index->first : NULL;
  rammer_status status = RAMMER_OK;
  while (row && strcmp(text_of(at(row, 0)), name)) row = row->next;
  if (!row) return malformed("an array is missing");
  if (row->count == 4) return fail(RAMMER_UNSUPPORTED, "weights in the model's own file are read by Python only: compile with --weights inside");
  uint64_t total = 0;
  for (size_t i = 0; i < sizeof TYPES / sizeof TYPES[0]; ++i)
    if (!strcmp(text_of(at(row, 1)), TYPES[i])) total = (uint64_t)TYPE_BYTES[i];
  if (!total || at(row, 2)->kind != LIST) return malformed("the type of an array is unknown");
  for (const json *extent = at(row, 2)->first; extent; extent = extent->next) {
    uint64_t length = (uint64_t)number_of(extent, 0, LARGEST, &status);
    if (status || (length && total > (uint64_t)LARGEST / length)) return malformed("an array is too large");
    total *= length;
  }
  uint64_t place = (uint64_t)number_of(at(row, 3), 0, LARGEST, &status);
  uint32_t checksum = (uint32_t)number_of(at(row, 4), 0, 0xFFFFFFFFll, &status);
  TRY(status);
  const member *m = find_member(&s->model->file, row->count == 6 ? text_of(at(row, 5)) : is_constant ? s->block : s->code_block);
  if (!m || place > m->size || m->size - place < total) return malformed("an array exceeds its member");
  *data = m->data + place;
  *bytes = (size_t)total;
  return crc32_of(*data, *bytes) == checksum ? RAMMER_OK : fail(RAMMER_BAD_FILE, "a constant is damaged: its checksum differs");
}

static rammer_status read_buffers(const source *s) {
  rammer_model *m = s->model;
  table *t = s->table;
  const json *list = get(s->calls, "buffers");
  rammer_status status = RAMMER_OK;
  if (!(t->buffer = take(&m->pool, list->count, sizeof(buffer)))) return RAMMER_NO_MEMORY;
  for (const json *row = list->first; row; row = row->next) {
    buffer *b = &t->buffer[t->buffers];
    b->bytes = (size_t)number_of(at(row, 0), 1, LARGEST, &status);
    TRY(status);
    ++t->buffers;
    if (!m->check_only) TRY(allocate(m, b));
    const json *fills = at(row, 1);
    for (const json *fill = fills->kind == LIST ? fills->first : NULL; fill; fill = fill->next) {
      const unsigned char *data;
      size_t bytes, place = (size_t)number_of(at(fill, 0), 0, LARGEST, &status);
      TRY(status);
      TRY(find_array(s, !strcmp(text_of(at(fill, 1)), "constant"), text_of(at(fill, 2)), &data, &bytes));
      if (place > b->bytes || b->bytes - place < bytes) return malformed("an array exceeds its memory");
      if (!m->check_only) TRY(write_bytes(m, b, (int64_t)place, data, bytes));
    }
  }
  return RAMMER_OK;
}

static rammer_status build_opencl(const source *s, const unsigned char *data, size_t bytes) {
  rammer_model *m = s->model;
  int status = 0, binary = 0;
  s->table->program = m->cl.create_program(m->context, 1, &m->device, &bytes, &data, &binary, &status);
  TRY(check_call(m, status ? status : binary, "loading the machine code"));
  return check_call(m, m->cl.build(s->table->program, 1, &m->device, text_of(get(s->calls, "options")), NULL, NULL), "building the machine code");
}

static rammer_status read_kernels(const source *s) {
  rammer_model *m = s->model;
  table *t = s->table;
  const json *list = get(s->calls, "kernels");
  rammer_status status = RAMMER_OK;
  int code = 0;
  if (!(t->kernel = take(&m->pool, list->count, sizeof(kernel)))) return RAMMER_NO_MEMORY;
  for (const json *row = list->first; row; row = row->next) {
    kernel *k = &t->kernel[t->kernels];
    const unsigned char *data;
    size_t bytes;
    const char *entry = text_of(at(row, 1));
    k->local_bytes = (int)number_of(at(row, 2), 0, 1 << 24, &status);
    TRY(status);
    TRY(find_array(s, 0, text_of(at(row, 0)), &data, &bytes));
    ++t->kernels;
    if (m->check_only) continue;
    if (m->kind == CUDA) {
      TRY(check_call(m, m->cu.load(&k->module, data), "loading the machine code"));
      TRY(check_call(m, m->cu.function(&k->handle, k->module, entry), "finding a kernel"));
      if (k->local_bytes) TRY(check_call(m, m->cu.limit(k->handle, 8 /* MAX_DYNAMIC_SHARED_SIZE_BYTES */, k->local_bytes), "reserving shared memory"));
    } else {
      if (!t->program) TRY(build_opencl(s, data, bytes));
      k->handle = m->cl.create_kernel(t->program, entry, &code);
      TRY(check_call(m, code, "finding a kernel"));
    }
  }
  return RAMMER_OK;
}

static rammer_status read_launch(rammer_model *m, table *t, const json *row, launch *x) {
  rammer_status status = RAMMER_OK;
  const json *list = at(row, 3);
  x->kernel = (size_t)number_of(at(row, 0), 0, (int64_t)t->kernels - 1, &status);
  x->groups = (size_t)number_of(at(row, 1), 1, INT32_MAX, &status);
  x->threads = (size_t)number_of(at(row, 2), 1, 1 << 16, &status);
  TRY(status);
  if (list->kind != LIST) return malformed("a launch has no arguments");
  if (!(x->arguments = take(&m->pool, list->count, sizeof(argument)))) return RAMMER_NO_MEMORY;
  for (const json *item = list->first; item; item = item->next) {
    argument *a = &x->arguments[x->count++];
    const char *kind = text_of(at(item, 0));
    int known = 0;
    for (int k = 0; k <= SKIPPED; ++k)
      if (!strcmp(kind, ARGUMENTS[k])) a->kind = (argument_kind)k, known = 1;
    if (!known) return malformed("the kind of an argument is unknown");
    if (a->kind == BUFFER || a->kind == ADDRESS) a->number = number_of(at(item, 1), a->kind == BUFFER ? -1 : 0, (int64_t)t->buffers - 1, &status);
    if (a->kind == INT32) a->number = number_of(at(item, 1), INT32_MIN, INT32_MAX, &status);
    if (a->kind == INT64) a->number = number_of(at(item, 1), -LARGEST, LARGEST, &status);
    if (a->kind == ADDRESS && !status) a->place = number_of(at(item, 2), 0, (int64_t)t->buffer[a->number].bytes, &status);
    TRY(status);
    if (m->kind == CUDA ? a->kind == BUFFER : a->kind == ADDRESS) return malformed("an argument is of the other driver");
    t->in_kernel |= a->kind == TURNS;
  }
  return RAMMER_OK;
}

/* Read the launches, and the counter of finished rows that ends their repetition. */
static rammer_status read_launches(const source *s) {
  rammer_model *m = s->model;
  table *t = s->table;
  const json *list = get(s->calls, "launches"), *until = get(s->calls, "until");
  rammer_status status = RAMMER_OK;
  if (!(t->launch = take(&m->pool, list->count, sizeof(launch)))) return RAMMER_NO_MEMORY;
  for (const json *row = list->first; row; row = row->next) TRY(read_launch(m, t, row, &t->launch[t->launches++]));
  if (until->kind == NOTHING) return RAMMER_OK;
  t->repeated = 1;
  t->done_buffer = number_of(at(until, 0), 0, (int64_t)t->buffers - 1, &status);
  if (!status) t->done_place = number_of(at(until, 1), 0, (int64_t)t->buffer[t->done_buffer].bytes - 4, &status);
  t->done_by = number_of(at(until, 2), 0, 1 << 20, &status);
  t->most_launches = number_of(at(until, 3), 1, INT32_MAX, &status);
  return status;
}

static rammer_status read_moves(const source *s, const json *list, int64_t bytes, size_t *count, move **moves) {
  rammer_status status = RAMMER_OK;
  if (list->kind != LIST) return malformed("a loop has no moves");
  if (!(*moves = take(&s->model->pool, list->count, sizeof(move)))) return RAMMER_NO_MEMORY;
  for (const json *row = list->first; row; row = row->next) {
    int64_t numbers[7];
    for (size_t i = 0; i < 7; ++i) numbers[i] = number_of(at(row, i), i < 4 ? -LARGEST : 0, i < 5 ? LARGEST : bytes, &status);
    TRY(status);
    for (size_t i = 1; i < 4; i += 2)
      if (llabs(numbers[i]) > LARGEST / s->table->turns) return malformed("a move is outside its memory");
    memcpy(&(*moves)[(*count)++], numbers, sizeof numbers);
  }
  return RAMMER_OK;
}

/* Read a loop: its iterations, and the moves between them unless one launch runs all iterations. */
static rammer_status read_loop(const source *s) {
  rammer_model *m = s->model;
  table *t = s->table;
  const json *loop = get(s->calls, "loop"), *until = get(loop, "until"), *terms = at(until, 1), *moves = get(loop, "moves");
  rammer_status status = RAMMER_OK;
  if (loop->kind == NOTHING) return t->in_kernel ? malformed("a launch is of a loop") : RAMMER_OK;
  if (m->kind != OPENCL) return fail(RAMMER_UNSUPPORTED, "loop programs on this device run in Python only");
  t->loops = 1;
  t->turns = number_of(get(loop, "turns"), 1, 1 << 24, &status);
  t->step = number_of(get(loop, "step"), 1, 1 << 24, &status);
  t->memory = number_of(get(loop, "memory"), 0, (int64_t)t->buffers - 1, &status);
  TRY(status);
  if (until->kind == LIST) {
    t->steps = number_of(at(until, 0), -LARGEST, LARGEST, &status);
    int64_t **lists[] = {&t->factors, &t->term_buffers, &t->term_places};
    for (size_t i = 0; i < 3; ++i)
      if (!(*lists[i] = take(&m->pool, terms->count, sizeof(int64_t)))) return RAMMER_NO_MEMORY;
    for (const json *term = terms->kind == LIST ? terms->first : NULL; term; term = term->next, ++t->terms) {
      t->factors[t->terms] = number_of(at(term, 0), -(1 << 20), 1 << 20, &status);
      t->term_buffers[t->terms] = number_of(at(term, 1), 0, (int64_t)t->buffers - 1, &status);
      TRY(status);
      t->term_places[t->terms] = number_of(at(term, 2), 0, (int64_t)t->buffer[t->term_buffers[t->terms]].bytes - 8, &status);
    }
  } else {
    t->steps = t->turns * t->step;
  }
  TRY(status);
  if (t->in_kernel != (moves->kind == NOTHING)) return malformed("a loop has moves and launches of another kind");
  for (size_t when = 0; when < TIMES && !t->in_kernel; ++when)
    TRY(read_moves(s, at(moves, when), (int64_t)t->buffer[t->memory].bytes, &t->moves[when], &t->move[when]));
  return RAMMER_OK;
}

/* ---- Reading lengths and ports ---- */

static rammer_status read_extent(rammer_model *m, const json *row, extent *e) {
  const json *terms = at(row, 0);
  rammer_status status = RAMMER_OK;
  if (row->kind == NUMBER) return e->offset = number_of(row, 0, LARGEST, &status), status;
  e->offset = number_of(at(row, 1), -LARGEST, LARGEST, &status);
  TRY(status);
  if (terms->kind != LIST) return malformed("an extent has no terms");
  e->lengths = take(&m->pool, terms->count, sizeof(size_t));
  e->factors = take(&m->pool, terms->count, sizeof(int64_t));
  if (!e->lengths || !e->factors) return RAMMER_NO_MEMORY;
  for (const json *term = terms->first; term; term = term->next, ++e->count) {
    size_t *number = &e->lengths[e->count];
    while (*number < m->lengths && strcmp(m->length[*number].name, text_of(at(term, 0)))) ++*number;
    if (*number == m->lengths) return malformed("an extent depends on an unknown length");
    e->factors[e->count] = number_of(at(term, 1), -LARGEST, LARGEST, &status);
    TRY(status);
  }
  return RAMMER_OK;
}

static char *copy_text(rammer_model *m, const char *text) {
  char *made = take(&m->pool, strlen(text) + 1, 1);
  return made ? memcpy(made, text, strlen(text)) : NULL;
}

/* Read the dimensions of a range and the lengths that follow from them. */
static rammer_status read_lengths(rammer_model *m, const json *ranged) {
  const json *tensors = get(ranged, "lengths"), *lists[2] = {get(ranged, "spans"), get(ranged, "formulas")}, *steps = get(ranged, "steps");
  rammer_status status = RAMMER_OK;
  if (ranged->kind == NOTHING) return RAMMER_OK;
  if (tensors->kind != OBJECT || lists[0]->kind != OBJECT) return malformed("a range has no lengths");
  if (!(m->length = take(&m->pool, lists[0]->count + lists[1]->count, sizeof(length)))) return RAMMER_NO_MEMORY;
  for (int derived = 0; derived < 2; ++derived) {
    for (const json *row = lists[derived]->kind == OBJECT ? lists[derived]->first : NULL; row; row = row->next) {
      length *n = &m->length[m->lengths];
      n->name = copy_text(m, row->key);
      n->tensor = copy_text(m, text_of(get(tensors, row->key)));
      if (!n->name || !n->tensor) return RAMMER_NO_MEMORY;
      if (derived) {
        const json *factors = at(row, 0);
        n->divisor = number_of(at(row, 1), 1, LARGEST, &status);
        TRY(status);
        if (factors->kind != LIST) return malformed("a length has no factors");
        if (!(n->factors = take(&m->pool, factors->count, sizeof(extent)))) return RAMMER_NO_MEMORY;
        for (const json *factor = factors->first; factor; factor = factor->next) TRY(read_extent(m, factor, &n->factors[n->count++]));
      } else {
        n->low = number_of(at(row, 0), 0, INT32_MAX, &status);
        n->now = n->high = number_of(at(row, 1), n->low, INT32_MAX, &status);
        n->step = get(steps, row->key)->kind == NOTHING ? 1 : number_of(get(steps, row->key), 1, INT32_MAX, &status);
      }
      TRY(status);
      ++m->lengths;
    }
  }
  return RAMMER_OK;
}

static rammer_status extent_at(const rammer_model *m, const extent *e, int64_t *found) {
  int64_t sum = e->offset, product;
  for (size_t i = 0; i < e->count; ++i)
    if (__builtin_mul_overflow(e->factors[i], m->length[e->lengths[i]].now, &product) || __builtin_add_overflow(sum, product, &sum)) return malformed("a length is out of range");
  if (sum < 0 || sum > LARGEST) return malformed("a length is out of range");
  return *found = sum, RAMMER_OK;
}

/* Compute the derived lengths and the extents of all ports from the dimensions. */
static rammer_status update_lengths(rammer_model *m) {
  for (size_t i = 0; i < m->lengths; ++i) {
    length *n = &m->length[i];
    int64_t product = 1, factor = 0;
    for (size_t k = 0; k < n->count; ++k) {
      TRY(extent_at(m, &n->factors[k], &factor));
      if (__builtin_mul_overflow(product, factor, &product)) return malformed("a length is out of range");
    }
    if (n->factors) n->now = product / n->divisor;
  }
  for (int kind = 0; kind < 2; ++kind) {
    for (size_t i = 0; i < m->count[kind]; ++i) {
      value *v = &m->value[m->port_values[kind][i]];
      int64_t *shape = (int64_t *)(uintptr_t)v->port.shape, bytes = (int64_t)v->port.element_bytes;
      for (size_t k = 0; k < v->port.rank; ++k) {
        int64_t size = shape[k];
        if (v->dims) TRY(extent_at(m, &v->dims[k], &size));
        if (size > v->whole[k]) return malformed("a port is longer than its memory");
        bytes *= shape[k] = size;
      }
      if ((size_t)bytes != v->port.bytes) v->bound = NULL;
      v->port.bytes = (size_t)bytes;
      m->ports[kind][i] = v->port;
    }
  }
  return RAMMER_OK;
}

/* Return the number of a tensor, or of the place after the last one. */
static size_t find_value(const rammer_model *m, const char *tensor) {
  size_t number = 0;
  while (number < m->values && strcmp(m->value[number].tensor, tensor)) ++number;
  return number;
}

/* Append a value with a tensor and a type. */
static rammer_status add_value(rammer_model *m, const char *tensor, const char *type) {
  if (m->values == m->room) {
    m->room = 2 * m->room + 16;
    value *more = take(&m->pool, m->room, sizeof(value));
    if (!more) return RAMMER_NO_MEMORY;
    if (m->values) memcpy(more, m->value, m->values * sizeof(value));
    m->value = more;
  }
  value *v = &m->value[m->values];
  v->tensor = copy_text(m, tensor);
  v->port.type = copy_text(m, type);
  if (!v->tensor || !v->port.type) return RAMMER_NO_MEMORY;
  ++m->values;
  return RAMMER_OK;
}

/* Read the shape of a value from a row of the calls, or compare it. */
static rammer_status read_shape(rammer_model *m, const json *row, value *v) {
  const json *extents = at(row, 5), *extent = extents->first;
  rammer_status status = RAMMER_OK;
  int64_t width = number_of(at(row, 4), 1, 8, &status), bytes = width;
  TRY(status);
  if (extents->kind != LIST || extents->count > MOST_RANK) return malformed("a port has no extents");
  if (v->known && (v->port.rank != extents->count || v->port.element_bytes != (size_t)width)) return malformed("a tensor has two shapes");
  int64_t *shape = v->known ? NULL : take(&m->pool, extents->count, sizeof *shape);
  if (!v->known && (!(v->whole = take(&m->pool, extents->count, sizeof *shape)) || !shape)) return RAMMER_NO_MEMORY;
  for (size_t i = 0; i < extents->count; ++i, extent = extent->next) {
    int64_t size = number_of(extent, 0, INT32_MAX, &status);
    TRY(status);
    if (size && bytes > LARGEST / size) return malformed("a port is too large");
    bytes *= size;
    if (!v->known) v->whole[i] = shape[i] = size;
    if (v->whole[i] != size) return malformed("a tensor has two shapes");
  }
  if (!v->known) v->port.rank = extents->count, v->port.element_bytes = (size_t)width, v->port.bytes = (size_t)bytes, v->port.shape = shape;
  v->known = 1;
  return status;
}

/* Read the place of a value in the memory of a program. */
static rammer_status read_place(const source *s, const json *row, placed *p) {
  rammer_model *m = s->model;
  const value *v = &m->value[p->value];
  const json *steps = at(row, 6), *step = steps->first;
  rammer_status status = RAMMER_OK;
  int64_t reach = (int64_t)v->port.element_bytes, dense = reach;
  p->buffer = number_of(at(row, 2), 0, (int64_t)s->table->buffers - 1, &status);
  p->place = number_of(at(row, 3), 0, LARGEST, &status);
  TRY(status);
  if (steps->kind != LIST || steps->count != v->port.rank) return malformed("a port has no strides");
  if (!(p->strides = take(&m->pool, steps->count, sizeof *p->strides))) return RAMMER_NO_MEMORY;
  for (size_t i = 0; i < v->port.rank; ++i, step = step->next) {
    p->strides[i] = number_of(step, 0, LARGEST, &status);
    TRY(status);
    if (v->whole[i] > 1 && p->strides[i] > LARGEST / (v->whole[i] - 1)) return malformed("a port exceeds its memory");
    if (v->whole[i]) reach += (v->whole[i] - 1) * p->strides[i];
    if (reach > LARGEST) return malformed("a port exceeds its memory");
  }
  p->dense = 1;
  for (size_t i = v->port.rank; i-- && v->port.bytes; dense *= v->whole[i])
    if (v->whole[i] > 1 && p->strides[i] != dense) p->dense = 0;
  if (!v->port.bytes) reach = 0;
  if (p->place + reach > (int64_t)s->table->buffer[p->buffer].bytes) return malformed("a port exceeds its memory");
  p->span = (size_t)reach;
  return RAMMER_OK;
}

/* Read the ports of a program, whose tensors are ports of the model or connect programs. */
static rammer_status read_places(const source *s) {
  static const char *const keys[2] = {"inputs", "outputs"};
  rammer_model *m = s->model;
  table *t = s->table;
  for (int kind = 0; kind < 2; ++kind) {
    const json *rows = get(s->calls, keys[kind]);
    if (rows->kind != LIST) return malformed("the ports are missing");
    if (!(t->ports[kind] = take(&m->pool, rows->count, sizeof(placed)))) return RAMMER_NO_MEMORY;
    for (const json *row = rows->first; row; row = row->next) {
      const char *tensor = text_of(at(row, 0)), *type = text_of(at(row, 1));
      placed *p = &t->ports[kind][t->count[kind]++];
      p->value = find_value(m, tensor);
      if (p->value == m->values && !kind) return malformed("a program reads a tensor that no program writes");
      if (p->value == m->values) TRY(add_value(m, tensor, type));
      value *v = &m->value[p->value];
      if (strcmp(v->port.type, type))
        return v->port.name ? fail(RAMMER_UNSUPPORTED, "port %s has type %s, which only Python converts", v->port.name, v->port.type) : malformed("a tensor has two types");
      if (kind ? v->is_input : !v->is_input && !v->is_written) return malformed("a program reads or writes a tensor at the wrong time");
      TRY(read_shape(m, row, v));
      if (v->scalar && (v->port.rank || v->port.element_bytes != 8)) return malformed("a length is no number");
      if (kind) v->is_written = 1;
      else v->is_read = 1;
      TRY(read_place(s, row, p));
    }
  }
  return RAMMER_OK;
}

/* Create the values of the model's ports, and those of lengths, which are no ports for the caller. */
static rammer_status read_ports(rammer_model *m, const json *head) {
  static const char *const keys[2] = {"inputs", "outputs"};
  for (int kind = 0; kind < 2; ++kind) {
    const json *list = get(head, keys[kind]);
    m->port_values[kind] = take(&m->pool, list->count, sizeof(size_t));
    m->ports[kind] = take(&m->pool, list->count, sizeof(rammer_port));
    if (!m->port_values[kind] || !m->ports[kind]) return RAMMER_NO_MEMORY;
    for (const json *row = list->first; row; row = row->next) {
      const char *tensor = text_of(at(row, 0)), *external = text_of(at(row, 2));
      size_t number = find_value(m, tensor);
      if (number < m->values) return fail(RAMMER_UNSUPPORTED, "output %s is a constant or an input, which only Python returns", *external ? external : tensor);
      TRY(add_value(m, tensor, text_of(at(row, 1))));
      value *v = &m->value[number];
      v->is_input = !kind;
      for (size_t i = 0; i < m->lengths && !kind; ++i)
        if (!strcmp(m->length[i].tensor, tensor)) v->scalar = &m->length[i];
      if (v->scalar) continue;
      if (!(v->port.name = copy_text(m, *external ? external : tensor))) return RAMMER_NO_MEMORY;
      m->port_values[kind][m->count[kind]++] = number;
    }
  }
  return RAMMER_OK;
}

/* Check that programs read and write all ports, and read the extents of ports that depend on lengths. */
static rammer_status finish_ports(rammer_model *m, const json *ranged) {
  for (int kind = 0; kind < 2; ++kind) {
    for (size_t i = 0; i < m->count[kind]; ++i) {
      value *v = &m->value[m->port_values[kind][i]];
      if (kind && !v->is_written) return fail(RAMMER_UNSUPPORTED, "output %s is a constant or an input, which only Python returns", v->port.name);
      if (!v->known) return fail(RAMMER_UNSUPPORTED, "input %s is not used, which only Python accepts", v->port.name);
      const json *dims = get(get(ranged, "shapes"), v->tensor), *dim = dims->first;
      if (!m->lengths) continue;
      if (dims->kind != LIST || dims->count != v->port.rank) return malformed("a port has no shape");
      if (!(v->dims = take(&m->pool, v->port.rank, sizeof(extent)))) return RAMMER_NO_MEMORY;
      for (size_t k = 0; k < v->port.rank; ++k, dim = dim->next) TRY(read_extent(m, dim, &v->dims[k]));
    }
  }
  for (size_t i = 0; i < m->values; ++i) {
    value *v = &m->value[i];
    if (!m->check_only && v->is_written && (v->is_read || !v->port.name) && !(v->own = take(&m->pool, v->port.bytes, 1))) return RAMMER_NO_MEMORY;
  }
  return update_lengths(m);
}

/* ---- Reading programs ---- */

/* Read the calls of table `number` of a segment, allocate its memory and load its kernels. */
static rammer_status read_table(source *s, const json *segment, size_t place, size_t number) {
  const json *code;
  char rest[40], name[64];
  snprintf(rest, sizeof rest, "%zu.code%zu", place, number);
  member_name(name, sizeof name, s->variant, rest);
  TRY(find_json(&s->model->file, name, &code));
  snprintf(s->code_block, sizeof s->code_block, "%.50s.constants", name);
  snprintf(rest, sizeof rest, "%zu.constants", place);
  member_name(s->block, sizeof s->block, s->variant, rest);
  s->calls = get(get(code, "record"), "calls");
  s->constants = get(segment, "constants");
  s->arrays = get(code, "arrays");
  if (s->calls->kind == NOTHING) return fail(RAMMER_UNSUPPORTED, "an earlier version wrote the file, without calls for C: compile the model again");
  if (*text_of(get(s->calls, "refused"))) return fail(RAMMER_UNSUPPORTED, "%s run in Python only", text_of(get(s->calls, "refused")));
  static const char *const lists[] = {"buffers", "kernels", "launches"};
  for (int i = 0; i < 3; ++i)
    if (get(s->calls, lists[i])->kind != LIST) return malformed("a list is missing");
  TRY(read_buffers(s));
  TRY(read_kernels(s));
  TRY(read_launches(s));
  TRY(read_loop(s));
  return read_places(s);
}

/* Read a program with its tables for short lengths. */
static rammer_status read_segment(source *s, const json *row, size_t place, segment *made) {
  rammer_model *m = s->model;
  const json *cases = get(row, "cases"), *until = at(cases, 1);
  rammer_status status = RAMMER_OK;
  size_t shorter = cases->kind == NOTHING ? 0 : until->count;
  if (cases->kind != NOTHING) {
    while (made->selector < m->lengths && strcmp(m->length[made->selector].tensor, text_of(at(cases, 0)))) ++made->selector;
    if (until->kind != LIST || made->selector == m->lengths) return malformed("a program has tables for an unknown length");
  }
  made->until = take(&m->pool, shorter, sizeof(int64_t));
  made->table = take(&m->pool, shorter + 1, sizeof(table));
  if (!made->until || !made->table) return RAMMER_NO_MEMORY;
  for (size_t i = 0; i < shorter; ++i) made->until[i] = number_of(at(until, i), 0, LARGEST, &status);
  TRY(status);
  for (size_t i = 0; i <= shorter; ++i) {
    s->table = &made->table[made->tables++];
    TRY(read_table(s, row, place, i));
  }
  return RAMMER_OK;
}

/* Read a variant: its lengths, its ports and its programs. */
static rammer_status load_variant(rammer_model *m, int variant) {
  source s = {.model = m, .variant = variant};
  const json *head = m->file.heads[variant], *segments = get(head, "segments"), *ranged = get(head, "ranged");
  size_t place = 0;
  for (const json *row = segments->kind == LIST ? segments->first : NULL; row; row = row->next)
    if (strcmp(text_of(get(row, "kind")), "program")) return fail(RAMMER_UNSUPPORTED, "operators on the host run in Python only");
  if (segments->kind != LIST) return malformed("the programs are missing");
  TRY(read_lengths(m, ranged));
  TRY(read_ports(m, head));
  if (!(m->segment = take(&m->pool, segments->count, sizeof(segment)))) return RAMMER_NO_MEMORY;
  for (const json *row = segments->first; row; row = row->next, ++place) TRY(read_segment(&s, row, place, &m->segment[m->segments++]));
  return finish_ports(m, ranged);
}

static rammer_status open_model(rammer_model *m, const char *path, const rammer_options *options) {
  int variant = 0;
  void *popped;
  if (options->trust_key) return fail(RAMMER_NOT_TRUSTED, "signatures are not checked in C: check the file with rammer run --trust-key, then set trust");
  if (!options->trust && !options->check_only) return fail(RAMMER_NOT_TRUSTED, "machine code runs only if the caller trusts the file: set trust");
  m->check_only = options->check_only;
  TRY(open_file(&m->file, path));
  TRY(choose_variant(m, options->device, &variant));
  if (m->kind == CUDA && !m->check_only) TRY(check_call(m, m->cu.push(m->context), "selecting the GPU"));
  rammer_status status = load_variant(m, variant);
  if (m->kind == CUDA && !m->check_only) m->cu.pop(&popped);
  return status;
}

rammer_status rammer_open(const char *path, const rammer_options *options, rammer_model **model) {
  static const rammer_options none = {0};
  if (!model || !path) return fail(RAMMER_BAD_CALL, "rammer_open needs a path and a place for the model");
  rammer_model *m = *model = calloc(1, sizeof *m);
  if (!m) return fail(RAMMER_NO_MEMORY, "out of memory");
  rammer_status status = open_model(m, path, options ? options : &none);
  free_pool(m->file.pool);
  m->file.pool = NULL;
  if (status) {
    rammer_close(m);
    *model = NULL;
  }
  return status;
}

/* ---- Calls of an open model ---- */

const rammer_port *rammer_inputs(const rammer_model *model, size_t *count) { return *count = model->count[0], model->ports[0]; }

const rammer_port *rammer_outputs(const rammer_model *model, size_t *count) { return *count = model->count[1], model->ports[1]; }

int rammer_length_at(const rammer_model *model, size_t index, rammer_length *into) {
  for (size_t i = 0; model && i < model->lengths; ++i) {
    const length *n = &model->length[i];
    if (n->factors || index--) continue;
    return *into = (rammer_length){n->name, n->low, n->high, n->step, n->now}, 1;
  }
  return 0;
}

rammer_status rammer_set_length(rammer_model *model, const char *name, int64_t value) {
  if (!model || !name) return fail(RAMMER_BAD_CALL, "a length needs a model and the name of a dimension");
  for (size_t i = 0; i < model->lengths; ++i) {
    length *n = &model->length[i];
    if (n->factors || strcmp(n->name, name)) continue;
    if (value < n->low || value > n->high || (n->high - value) % n->step)
      return fail(RAMMER_BAD_CALL, "length %s is %lld, the range is %lld to %lld in steps of %lld", name, (long long)value, (long long)n->low, (long long)n->high, (long long)n->step);
    n->now = value;
    rammer_status status = update_lengths(model);
    model->broken |= status != RAMMER_OK;
    return status;
  }
  return fail(RAMMER_BAD_CALL, "the model has no length %s", name);
}

static rammer_status bind_port(rammer_model *m, int kind, const char *name, void *data, size_t bytes) {
  static const char *const kinds[2] = {"input", "output"};
  if (!m || !name) return fail(RAMMER_BAD_CALL, "binding needs a model and the name of a port");
  for (size_t i = 0; i < m->count[kind]; ++i) {
    value *v = &m->value[m->port_values[kind][i]];
    if (strcmp(v->port.name, name)) continue;
    if (bytes != v->port.bytes) return fail(RAMMER_BAD_CALL, "%s %s needs %zu bytes (%s), not %zu", kinds[kind], name, v->port.bytes, v->port.type, bytes);
    if (!data && bytes) return fail(RAMMER_BAD_CALL, "%s %s: the array is NULL", kinds[kind], name);
    v->bound = data;
    return RAMMER_OK;
  }
  return fail(RAMMER_BAD_CALL, "the model has no %s %s", kinds[kind], name);
}

rammer_status rammer_bind_input(rammer_model *model, const char *name, const void *data, size_t bytes) {
  return bind_port(model, 0, name, (void *)(uintptr_t)data, bytes);
}

rammer_status rammer_bind_output(rammer_model *model, const char *name, void *data, size_t bytes) { return bind_port(model, 1, name, data, bytes); }

/* ---- Running ---- */

/* Copy the elements of a dense array with these extents to or from a span with strides in bytes. Without an array, write zeros. */
static void copy_strided(size_t rank, const int64_t *shape, const int64_t *strides, size_t width, unsigned char *span, unsigned char *dense, int to_dense) {
  size_t elements = 1;
  for (size_t i = 0; i < rank; ++i) elements *= (size_t)shape[i];
  for (size_t number = 0; number < elements; ++number) {
    size_t rest = number, place = 0;
    for (size_t i = rank; i--; rest /= (size_t)shape[i]) place += rest % (size_t)shape[i] * (size_t)strides[i];
    if (!dense) memset(span + place, 0, width);
    else if (to_dense) memcpy(dense + number * width, span + place, width);
    else memcpy(span + place, dense + number * width, width);
  }
}

/* Copy a value between the program's memory and an array with these extents. Memory past the extents of an input is zero. */
static rammer_status move_value(rammer_model *m, const table *t, const placed *p, unsigned char *array, const int64_t *shape, int is_output) {
  const value *v = &m->value[p->value];
  const buffer *b = &t->buffer[p->buffer];
  size_t rank = v->port.rank, width = v->port.element_bytes, bytes = width;
  int whole = 1;
  for (size_t i = 0; i < rank; ++i) bytes *= (size_t)shape[i], whole &= shape[i] == v->whole[i];
  if (!p->span || (is_output && !bytes)) return RAMMER_OK;
  if (p->dense && whole) return is_output ? read_bytes(m, b, p->place, array, bytes) : write_bytes(m, b, p->place, array, bytes);
  unsigned char *span = calloc(1, p->span);
  if (!span) return fail(RAMMER_NO_MEMORY, "out of memory: %zu bytes for a port", p->span);
  rammer_status status = is_output || !p->dense ? read_bytes(m, b, p->place, span, p->span) : RAMMER_OK;
  if (!status && !is_output && !p->dense && !whole) copy_strided(rank, v->whole, p->strides, width, span, NULL, 0);
  if (!status && bytes) copy_strided(rank, shape, p->strides, width, span, array, is_output);
  if (!status && !is_output) status = write_bytes(m, b, p->place, span, p->span);
  free(span);
  return status;
}

static rammer_status write_input(rammer_model *m, const table *t, const placed *p) {
  const value *v = &m->value[p->value];
  if (v->scalar) return write_bytes(m, &t->buffer[p->buffer], p->place, &v->scalar->now, sizeof v->scalar->now);
  return v->own ? move_value(m, t, p, v->own, v->whole, 0) : move_value(m, t, p, v->bound, v->port.shape, 0);
}

static rammer_status read_output(rammer_model *m, const table *t, const placed *p) {
  const value *v = &m->value[p->value];
  if (!v->own) return move_value(m, t, p, v->bound, v->port.shape, 1);
  TRY(move_value(m, t, p, v->own, v->whole, 1));
  int64_t strides[MOST_RANK], step = (int64_t)v->port.element_bytes;
  for (size_t i = v->port.rank; i--; step *= v->whole[i]) strides[i] = step;
  if (v->port.name && v->port.bytes) copy_strided(v->port.rank, v->port.shape, strides, v->port.element_bytes, v->own, v->bound, 1);
  return RAMMER_OK;
}

/* Start a kernel with its arguments; `turns` are the iterations of a loop. */
static rammer_status start_launch(rammer_model *m, table *t, const launch *x, int64_t turns) {
  enum { MOST_ARGUMENTS = 1024 };
  union {
    void *pointer;
    uint64_t address;
    int64_t wide;
    int32_t narrow;
  } values[MOST_ARGUMENTS];
  void *pointers[MOST_ARGUMENTS], *function = t->kernel[x->kernel].handle;
  int64_t numbers[] = {[RUN_NUMBER] = t->epoch, [LAUNCH_NUMBER] = t->launched, [MOVED] = t->moved, [TURNS] = turns, [SKIPPED] = t->turns - turns};
  if (x->count > MOST_ARGUMENTS) return fail(RAMMER_UNSUPPORTED, "a kernel has %zu arguments", x->count);
  for (size_t i = 0; i < x->count; ++i) {
    const argument *a = &x->arguments[i];
    size_t bytes = 8;
    pointers[i] = &values[i];
    if (a->kind == BUFFER) values[i].pointer = a->number < 0 ? NULL : (void *)(uintptr_t)t->buffer[a->number].handle, bytes = sizeof(void *);
    else if (a->kind == ADDRESS) values[i].address = t->buffer[a->number].handle + (uint64_t)a->place;
    else if (a->kind == INT64) values[i].wide = a->number;
    else values[i].narrow = (int32_t)(a->kind == INT32 ? a->number : numbers[a->kind]), bytes = 4;
    if (m->kind == OPENCL) TRY(check_call(m, m->cl.set_argument(function, (uint32_t)i, bytes, a->kind == BUFFER && a->number < 0 ? NULL : &values[i]), "setting an argument"));
  }
  if (m->kind == CUDA)
    return check_call(m, m->cu.launch(function, (unsigned)x->groups, 1, 1, (unsigned)x->threads, 1, 1, (unsigned)t->kernel[x->kernel].local_bytes, NULL, pointers, NULL), "launching a kernel");
  size_t items = x->groups * x->threads;
  return check_call(m, m->cl.enqueue(m->queue, function, 1, NULL, &items, &x->threads, 0, NULL, NULL), "launching a kernel");
}

static rammer_status start_all(rammer_model *m, table *t, int64_t turns) {
  ++t->launched;
  for (size_t i = 0; i < t->launches; ++i) TRY(start_launch(m, t, &t->launch[i], turns));
  return RAMMER_OK;
}

/* Launch until the counter of finished rows reaches its value: kernels may end early, and each launch finishes at least one row. A
 * kernel that runs all iterations of a loop takes the number of the first one, and counts the moves between them. */
static rammer_status run_repeated(rammer_model *m, table *t, int64_t turns) {
  int64_t first = t->epoch, moved = t->moved, target = t->in_kernel ? moved + turns : t->done_by * first;
  for (int64_t n = 0; n < t->most_launches; ++n) {
    int32_t finished = 0;
    TRY(start_all(m, t, turns));
    TRY(read_bytes(m, &t->buffer[t->done_buffer], t->done_place, &finished, sizeof finished));
    if (finished != target) continue;
    if (t->in_kernel) t->epoch = first + turns - 1, t->moved = target;
    if (t->epoch * (t->done_by + 1) > RESET_AFTER / 64 || t->launched > RESET_AFTER / 64 || t->moved > RESET_AFTER / 64) {
      TRY(clear_buffer(m, &t->buffer[t->done_buffer]));
      t->epoch = t->launched = t->moved = 0;
    }
    return RAMMER_OK;
  }
  return fail(RAMMER_DEVICE_FAILED, "the program makes no progress");
}

/* Queue the moves of a loop at one time. The last slice may be clipped at the end of its buffer; a backward move begins at the first
 * slice in use. */
static rammer_status queue_moves(rammer_model *m, const table *t, int when, int64_t turn, int64_t turns) {
  void *memory = (void *)(uintptr_t)t->buffer[t->memory].handle;
  for (size_t i = 0; i < t->moves[when]; ++i) {
    const move *x = &t->move[when][i];
    int64_t skipped = t->turns - turns, to = x->to + (turn + (x->to_by < 0 ? skipped : 0)) * x->to_by, from = x->from + (turn + (x->from_by < 0 ? skipped : 0)) * x->from_by;
    int64_t bytes = x->bytes;
    if (to < 0 || from < 0) return malformed("a move is outside its memory");
    if (bytes > x->to_end - to) bytes = x->to_end - to;
    if (bytes > x->from_end - from) bytes = x->from_end - from;
    if (bytes > 0) TRY(check_call(m, m->cl.copy(m->queue, memory, memory, (size_t)from, (size_t)to, (size_t)bytes, 0, NULL, NULL), "moving values of a loop"));
  }
  return RAMMER_OK;
}

/* Compute the iterations of a loop from the lengths that its inputs hold. */
static rammer_status count_turns(rammer_model *m, const table *t, int64_t *turns) {
  int64_t steps = t->steps, given, product;
  for (size_t i = 0; i < t->terms; ++i) {
    TRY(read_bytes(m, &t->buffer[t->term_buffers[i]], t->term_places[i], &given, sizeof given));
    if (__builtin_mul_overflow(given, t->factors[i], &product) || __builtin_add_overflow(steps, product, &steps) || steps > LARGEST) return fail(RAMMER_BAD_CALL, "the number of iterations is out of range");
  }
  steps = steps > 0 ? (steps - 1) / t->step + 1 : 1;
  return *turns = steps < t->turns ? steps : t->turns, RAMMER_OK;
}

static rammer_status run_loop(rammer_model *m, table *t) {
  int64_t turns = 1;
  TRY(count_turns(m, t, &turns));
  if (t->in_kernel) {
    if (!t->repeated) return malformed("a loop has no end");
    ++t->epoch;
    ++t->moved;
    return run_repeated(m, t, turns);
  }
  TRY(queue_moves(m, t, ONCE, 0, turns));
  TRY(queue_moves(m, t, FIRST, 0, turns));
  for (int64_t turn = 0; turn < turns; ++turn) {
    TRY(queue_moves(m, t, BEFORE, turn, turns));
    ++t->epoch;
    if (t->repeated) TRY(run_repeated(m, t, turns));
    else TRY(start_all(m, t, turns));
    TRY(queue_moves(m, t, AFTER, turn, turns));
  }
  return queue_moves(m, t, LAST, 0, turns);
}

static rammer_status run_segment(rammer_model *m, const segment *s) {
  size_t number = 0;
  while (number + 1 < s->tables && s->until[number] < m->length[s->selector].now) ++number;
  table *t = &s->table[number + 1 < s->tables ? number + 1 : 0];
  for (size_t i = 0; i < t->count[0]; ++i) TRY(write_input(m, t, &t->ports[0][i]));
  if (t->loops) {
    TRY(run_loop(m, t));
  } else {
    ++t->epoch;
    TRY(t->repeated ? run_repeated(m, t, 1) : start_all(m, t, 1));
  }
  TRY(check_call(m, m->kind == CUDA ? m->cu.finish(NULL) : m->cl.finish(m->queue), "waiting for the device"));
  for (size_t i = 0; i < t->count[1]; ++i) TRY(read_output(m, t, &t->ports[1][i]));
  return RAMMER_OK;
}

rammer_status rammer_run(rammer_model *model) {
  static const char *const kinds[2] = {"input", "output"};
  void *popped;
  if (!model || model->check_only) return fail(RAMMER_BAD_CALL, "the model was opened to check its file alone");
  if (model->broken) return fail(RAMMER_DEVICE_FAILED, "an earlier run failed: open the file again");
  for (int kind = 0; kind < 2; ++kind) {
    for (size_t i = 0; i < model->count[kind]; ++i) {
      const value *v = &model->value[model->port_values[kind][i]];
      if (!v->bound && v->port.bytes) return fail(RAMMER_BAD_CALL, "%s %s is not bound", kinds[kind], v->port.name);
    }
  }
  if (model->kind == CUDA) TRY(check_call(model, model->cu.push(model->context), "selecting the GPU"));
  rammer_status status = RAMMER_OK;
  for (size_t i = 0; i < model->segments && !status; ++i) status = run_segment(model, &model->segment[i]);
  if (model->kind == CUDA) model->cu.pop(&popped);
  model->broken = status == RAMMER_DEVICE_FAILED;
  return status;
}

/* Free the device memory and the kernels of a program. */
static void free_table(rammer_model *m, table *t) {
  for (size_t i = 0; t->kernel && i < t->kernels; ++i) {
    kernel *k = &t->kernel[i];
    if (m->kind == CUDA ? k->module != NULL : k->handle != NULL) {
      if (m->kind == CUDA) m->cu.unload(k->module);
      else m->cl.free_kernel(k->handle);
    }
  }
  for (size_t i = 0; t->buffer && i < t->buffers; ++i) {
    buffer *b = &t->buffer[i];
    if (b->handle) {
      if (m->kind == CUDA) m->cu.free(b->handle);
      else m->cl.free_buffer((void *)(uintptr_t)b->handle);
    }
  }
  if (t->program) m->cl.free_program(t->program);
}

static void free_tables(rammer_model *m) {
  for (size_t i = 0; m->segment && i < m->segments; ++i)
    for (size_t k = 0; m->segment[i].table && k < m->segment[i].tables; ++k) free_table(m, &m->segment[i].table[k]);
}

static void free_opencl(rammer_model *m) {
  if (m->queue) m->cl.finish(m->queue);
  free_tables(m);
  if (m->queue) m->cl.free_queue(m->queue);
  if (m->context) m->cl.free_context(m->context);
}

static void free_cuda(rammer_model *m) {
  void *popped;
  if (m->context && !m->cu.push(m->context)) {
    m->cu.finish(NULL);
    free_tables(m);
    m->cu.pop(&popped);
  }
  if (m->cu_retained) m->cu.release(m->cu_device);
}

void rammer_close(rammer_model *model) {
  if (!model) return;
  if (!model->check_only && model->kind == OPENCL) free_opencl(model);
  if (!model->check_only && model->kind == CUDA) free_cuda(model);
  free_pool(model->file.pool);
  free_pool(model->pool);
  free(model);
}
