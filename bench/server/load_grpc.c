/* A load generator for one unary gRPC method, ModelInfer: HTTP/2 as far as that needs it, no TLS.
 *
 * RATE 0, closed loop: CALLS calls are always under way on each connection. Any other RATE, open loop: so many calls a
 * second, spread over the connections, at most CALLS on each; latency counts from the instant a call was due.
 * BENCH_REQUEST names a file with the message. A call is an error unless it ends with a message. Prints `window` when
 * the counted window begins (after the warm-up) and one JSON line when it ends.
 * usage: load_grpc PORT CONNECTIONS CALLS RATE WARMUP_S WINDOW_S
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 64
#define BUFFER (1 << 20)
#define SAMPLES 4000000
#define PATIENCE_US 2000000
#define MESSAGE_MAX 16000  /* one DATA frame, which no server refuses */
#define RECENT 65536       /* streams that may be open between the oldest and the newest of a connection */
#define WINDOW 0x7fffffff
#define ACKNOWLEDGE_BYTES (1 << 30)
#define HEAD 9             /* of a frame */
#define OUT (1 << 22)

enum { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4 };

struct call { long long due_us; long bytes; };
struct conn {
  int fd, open, wants_out;
  unsigned next_id;
  long long window; /* bytes of DATA that the server takes */
  long read_bytes;  /* DATA since the last WINDOW_UPDATE of ours */
  size_t used, out_at, out_used;
  unsigned char *buf, *out;
  struct call *calls;
};
static struct conn conns[CONNECTIONS];
static int ep, connections, calls_max;
static double rate;
static unsigned char call_frames[MESSAGE_MAX + 512];
static int id_at[2], call_len, data_len;
static long completed, errors, sampled;
static int counting;
static unsigned *samples;

static long long now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}
static _Noreturn void die(const char *why) {
  fprintf(stderr, "load_grpc: %s\n", why);
  exit(2);
}
static unsigned get32(const unsigned char *at) { return (unsigned)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3]; }
static void put32(unsigned char *at, unsigned v) { for (int i = 0; i < 4; i++) at[i] = v >> (24 - 8 * i); }
static int frame(unsigned char *at, int length, int type, int flags, unsigned id) {
  at[0] = length >> 16, at[1] = length >> 8, at[2] = length, at[3] = type, at[4] = flags;
  put32(at + 5, id);
  return HEAD;
}
static int text(unsigned char *at, const char *word) { /* a string of HPACK, shorter than 127 bytes, not compressed */
  at[0] = strlen(word);
  memcpy(at + 1, word, at[0]);
  return at[0] + 1;
}
static void prepare(const char *path) {
  static unsigned char message[MESSAGE_MAX + 1];
  FILE *file = path ? fopen(path, "rb") : NULL;
  int n = file ? fread(message, 1, sizeof message, file) : 0;
  if (n < 1 || n > MESSAGE_MAX) die("BENCH_REQUEST names no message that fits");
  unsigned char *head = call_frames + HEAD, *at = head;
  *at++ = 0x83;                                                                 /* :method POST */
  *at++ = 0x86;                                                                 /* :scheme http */
  *at++ = 0x04, at += text(at, "/inference.GRPCInferenceService/ModelInfer");   /* :path */
  *at++ = 0x01, at += text(at, "127.0.0.1");                                    /* :authority */
  *at++ = 0x0f, *at++ = 0x10, at += text(at, "application/grpc");               /* content-type */
  *at++ = 0x00, at += text(at, "te"), at += text(at, "trailers");
  frame(call_frames, at - head, HEADERS, END_HEADERS, 0);
  id_at[0] = 5;
  id_at[1] = at - call_frames + 5;
  data_len = n + 5;
  at += frame(at, data_len, DATA, END_STREAM, 0);
  *at++ = 0;
  put32(at, n);
  memcpy(at + 4, message, n);
  call_len = at + 4 + n - call_frames;
}
static void flush(struct conn *c) {
  while (c->out_at < c->out_used) {
    ssize_t n = write(c->fd, c->out + c->out_at, c->out_used - c->out_at);
    if (n < 0 && errno != EAGAIN) die("the server has closed a connection");
    if (n < 0) break;
    c->out_at += n;
  }
  if (c->out_at == c->out_used) c->out_at = c->out_used = 0;
  int wants = c->out_used > 0;
  if (wants != c->wants_out) {
    struct epoll_event e = {.events = EPOLLIN | (wants ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
    c->wants_out = wants;
  }
}
static void queue(struct conn *c, const void *bytes, int n) {
  if (c->out_used + n > OUT) die("the server does not read");
  memcpy(c->out + c->out_used, bytes, n);
  c->out_used += n;
}
static int free_for_one(struct conn *c) { return c->open < calls_max && c->window >= data_len; }
static void fire(struct conn *c, long long due_us) {
  unsigned id = c->next_id;
  c->next_id += 2;
  c->open++;
  c->window -= data_len;
  c->calls[id / 2 % RECENT] = (struct call){due_us, 0};
  put32(call_frames + id_at[0], id);
  put32(call_frames + id_at[1], id);
  queue(c, call_frames, call_len);
}
static void refill(struct conn *c) {
  while (!rate && free_for_one(c)) fire(c, now_us());
}
static void finish(struct conn *c, struct call *call, int fine) {
  c->open--;
  if (!fine && errors++ < 3) fprintf(stderr, "load_grpc: a call has ended without a message\n");
  if (counting) {
    completed++;
    if (sampled < SAMPLES) samples[sampled++] = now_us() - call->due_us;
  }
}
static void small(struct conn *c, int type, int flags, const void *body, int n) {
  unsigned char bytes[HEAD + 64];
  frame(bytes, n, type, flags, 0);
  if (n) memcpy(bytes + HEAD, body, n);
  queue(c, bytes, HEAD + n);
}
static void take(struct conn *c, int type, int flags, unsigned id, const unsigned char *body, int n) {
  struct call *call = &c->calls[id / 2 % RECENT];
  unsigned char word[4];
  switch (type) {
  case DATA:
    call->bytes += n;
    c->read_bytes += n;
    if (c->read_bytes > ACKNOWLEDGE_BYTES) {
      put32(word, c->read_bytes);
      small(c, WINDOW_UPDATE, 0, word, 4);
      c->read_bytes = 0;
    }
    if (flags & END_STREAM) finish(c, call, 0);
    break;
  case HEADERS:
    if (flags & END_STREAM) finish(c, call, call->bytes > 5);
    break;
  case RST_STREAM: finish(c, call, 0); break;
  case SETTINGS:
    if (!(flags & ACK)) small(c, SETTINGS, ACK, NULL, 0);
    break;
  case PING:
    if (!(flags & ACK)) small(c, PING, ACK, body, n);
    break;
  case GOAWAY: die("the server has said goodbye");
  case WINDOW_UPDATE:
    if (!id) c->window += get32(body) & WINDOW;
    break;
  }
}
static void arrived(struct conn *c) {
  ssize_t n = read(c->fd, c->buf + c->used, BUFFER - c->used);
  if (n < 0 && errno == EAGAIN) return;
  if (n <= 0) die("the server has closed a connection");
  c->used += n;
  size_t at = 0;
  while (c->used - at >= HEAD) {
    unsigned char *h = c->buf + at;
    int length = h[0] << 16 | h[1] << 8 | h[2];
    if (c->used - at < (size_t)(HEAD + length)) break;
    take(c, h[3], h[4], get32(h + 5) & WINDOW, h + HEAD, length);
    at += HEAD + length;
  }
  memmove(c->buf, c->buf + at, c->used - at);
  c->used -= at;
  refill(c);
}
static void dial(struct conn *c, int port) {
  int one = 1;
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(c->fd, (void *)&a, sizeof a)) die("nobody listens");
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  c->buf = malloc(BUFFER);
  c->out = malloc(OUT);
  c->calls = calloc(RECENT, sizeof *c->calls);
  c->next_id = 1;
  c->window = 65535;
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
  queue(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
  unsigned char settings[12] = {0, 1, 0, 0, 0, 0, 0, 4}, window[4]; /* no table for headers; all windows wide open */
  put32(settings + 8, WINDOW);
  small(c, SETTINGS, 0, settings, 12);
  put32(window, WINDOW - 65535);
  small(c, WINDOW_UPDATE, 0, window, 4);
  refill(c);
  flush(c);
}
/* A closed loop is counted from an answer to an answer: a server that batches gives many at once, and a window that
 * begins or ends between two batches would count up to one too few or too many. */
static int due(long long now, long long at, int ready) {
  return now >= at && (rate || ready || now >= at + PATIENCE_US);
}
static int order(const void *a, const void *b) { return *(unsigned *)a > *(unsigned *)b ? 1 : -1; }
int main(int argc, char **argv) {
  if (argc != 7) die("usage: load_grpc PORT CONNECTIONS CALLS RATE WARMUP_S WINDOW_S");
  connections = atoi(argv[2]);
  calls_max = atoi(argv[3]);
  rate = atof(argv[4]);
  double warmup_s = atof(argv[5]), window_s = atof(argv[6]);
  if (connections < 1 || connections > CONNECTIONS) die("that is not a number of connections");
  samples = malloc(SAMPLES * sizeof *samples);
  prepare(getenv("BENCH_REQUEST"));
  ep = epoll_create1(0);
  for (int i = 0; i < connections; i++) dial(&conns[i], atoi(argv[1]));
  double gap_us = rate ? 1e6 / rate : 1e6, due_us = now_us();
  long long begin = now_us() + warmup_s * 1e6, end = begin + window_s * 1e6;
  int turn = 0;
  for (struct epoll_event events[512];;) {
    long long wait = rate ? (long long)due_us - now_us() : 100000;
    struct timespec t = {.tv_nsec = wait < 0 ? 0 : (wait > 100000 ? 100000 : wait) * 1000};
    int ready = epoll_pwait2(ep, events, 512, &t, NULL);
    for (int i = 0; i < ready; i++)
      if (events[i].events & ~EPOLLOUT) arrived(events[i].data.ptr);
    long long now = now_us();
    for (; rate && due_us <= now; due_us += gap_us) {
      int tried = 0;
      while (tried < connections && !free_for_one(&conns[turn])) turn = (turn + 1) % connections, tried++;
      if (tried == connections) break;
      fire(&conns[turn], due_us);
      turn = (turn + 1) % connections;
    }
    for (int i = 0; i < connections; i++)
      if (conns[i].out_used) flush(&conns[i]);
    if (!counting && due(now, begin, ready)) { counting = 1; errors = 0; begin = now; puts("window"); fflush(stdout); }
    if (counting && due(now, end, ready)) { end = now; break; }
  }
  qsort(samples, sampled, sizeof *samples, order);
  printf("{\"requests\":%ld,\"errors\":%ld,\"seconds\":%.3f,\"p50_us\":%u,\"p99_us\":%u}\n", completed, errors,
         (end - begin) / 1e6, sampled ? samples[sampled / 2] : 0, sampled ? samples[sampled * 99 / 100] : 0);
  return 0;
}
