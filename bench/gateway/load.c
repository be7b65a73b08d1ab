/* A load generator. RATE 0, closed loop: each connection sends a request when its answer is complete. Any other RATE,
 * open loop: so many requests a second, each on an idle connection that is open already, whose latency counts from the
 * instant it was due: evenly spaced, or with a SEED at random instants (exponential gaps, the same ones for the same seed).
 *
 * Every answer is checked: status 200; a stream must hold exactly N events and [DONE]. Prints `window` when the
 * counted window begins (after the warm-up) and one JSON line when it ends. p50_us and p99_us are of the whole answer,
 * of a stream up to its first event. event_reads are the reads that brought an event: fewer than events, if some came
 * glued together.
 * usage: load PORT CONNECTIONS unary|stream BODY_BYTES EVENTS INTERVAL_US RATE WARMUP_S WINDOW_S [SEED]
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 4096
#define BUFFER 131072
#define SAMPLES 4000000
#define PATIENCE_US 2000000
#define REQUEST_MAX (1 << 20)

struct conn {
  int fd, closes, chunked, in_body, idle;
  long long sent_us;
  long long left;      /* bytes of the body, or of the chunk, still to come */
  int state;           /* chunked: 0 size line, 1 data, 2 CRLF after data, 3 trailers */
  int match, done;     /* how much of "data: {" was seen; [DONE] seen */
  long events;
  size_t used;
  char *buf;
};
static struct conn conns[CONNECTIONS], *idle[CONNECTIONS]; /* idle: open loop; fd -1 if it is to be dialled first */
static int idles, port, ep, events_wanted, streams;
static double rate;
static int random_gaps;
static char *request;
static int request_len;
static long completed, events_seen, event_reads, errors, reconnects;
static int counting;
static unsigned *samples;
static long sampled;

static long long now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}
static void sample(struct conn *c) {
  if (counting && sampled < SAMPLES) samples[sampled++] = now_us() - c->sent_us;
}
static void fire(struct conn *c, long long due_us) {
  c->in_body = c->chunked = c->closes = c->state = c->match = c->done = c->idle = 0;
  c->events = 0;
  c->sent_us = due_us;
  if (write(c->fd, request, request_len) != request_len) errors++;
}
static void dial(struct conn *c) {
  int one = 1;
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  c->used = 0;
  if (connect(c->fd, (void *)&a, sizeof a)) { perror("connect"); exit(1); }
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
}
static void rest(struct conn *c) {
  c->idle = 1;
  idle[idles++] = c;
}
static void hang_up(struct conn *c) {
  close(c->fd);
  c->fd = -1;
}
/* The connection has no request under way: what next? */
static void next(struct conn *c) {
  if (rate) return rest(c);
  if (c->fd < 0) dial(c);
  fire(c, now_us());
}
static void redial(struct conn *c) {
  hang_up(c);
  reconnects += counting;
  next(c);
}
static void finish(struct conn *c) {
  if (streams && (c->events != events_wanted || !c->done)) errors++;
  if (counting) completed++;
  if (!streams) sample(c);
  if (c->closes) redial(c);
  else next(c);
}
/* Count the events in a piece of body; pieces may cut anywhere. */
static void count(struct conn *c, const char *at, size_t n) {
  static const char mark[] = "data: {";
  for (size_t i = 0; i < n; i++) {
    if (at[i] == mark[c->match]) {
      if (++c->match == 7) {
        if (!c->events++) sample(c);
        events_seen += counting;
        c->match = 0;
      }
    } else {
      if (c->match == 6 && at[i] == '[') c->done = 1;
      c->match = at[i] == 'd';
    }
  }
}
/* Consume what is buffered; 1 when the answer is complete, -1 on nonsense. */
static int consume(struct conn *c) {
  size_t at = 0;
  if (!c->in_body) {
    char *end = memmem(c->buf, c->used, "\r\n\r\n", 4);
    if (!end) return 0;
    *end = 0;
    if (strncmp(c->buf, "HTTP/1.1 200", 12)) {
      if (errors < 3) fprintf(stderr, "answer: %.120s\n", c->buf);
      return -1;
    }
    char *length = strcasestr(c->buf, "\r\ncontent-length:");
    c->chunked = strcasestr(c->buf, "\r\ntransfer-encoding: chunked") != NULL;
    c->closes = strcasestr(c->buf, "\r\nconnection: close") != NULL;
    c->left = length ? atoll(length + 17) : 0;
    c->in_body = 1;
    at = end + 4 - c->buf;
    if (!c->chunked && !length) return -1;
  }
  int complete = 0;
  if (!c->chunked) {
    size_t n = c->used - at;
    if ((long long)n > c->left) n = c->left;
    c->left -= n;
    at += n;
    complete = c->left == 0;
  } else {
    while (at < c->used && !complete) {
      if (c->state == 1) {
        size_t n = c->used - at;
        if ((long long)n > c->left) n = c->left;
        if (streams) count(c, c->buf + at, n);
        c->left -= n;
        at += n;
        if (!c->left) c->state = 2;
        continue;
      }
      char *line = memchr(c->buf + at, '\n', c->used - at);
      if (!line) break;
      if (c->state == 0) {
        c->left = strtoll(c->buf + at, NULL, 16);
        c->state = c->left ? 1 : 3;
      } else if (c->state == 2) c->state = 0;
      else if (line - (c->buf + at) <= 1) complete = 1;
      at = line + 1 - c->buf;
    }
  }
  memmove(c->buf, c->buf + at, c->used - at);
  c->used -= at;
  return complete;
}
static void arrived(struct conn *c) {
  ssize_t n = read(c->fd, c->buf + c->used, BUFFER - c->used - 1);
  if (n <= 0 && c->idle) return hang_up(c); /* idle for too long; it is dialled again when its turn comes */
  if (n <= 0) { errors++; redial(c); return; }
  c->used += n;
  c->buf[c->used] = 0;
  long before = c->events;
  int verdict = consume(c);
  event_reads += counting && c->events > before;
  if (verdict > 0) finish(c);
  else if (verdict < 0) { errors++; redial(c); }
}
/* What every connection sends: the file that BENCH_REQUEST names, or a chat request of that many bytes. */
static void prepare(int body_bytes, int interval_us) {
  const char *given = getenv("BENCH_REQUEST");
  if (given) {
    FILE *file = fopen(given, "rb");
    request = malloc(REQUEST_MAX);
    request_len = file ? fread(request, 1, REQUEST_MAX, file) : 0;
    if (!request_len || request_len == REQUEST_MAX) { fprintf(stderr, "load: %s is no request\n", given); exit(2); }
    fclose(file);
    return;
  }
  char *fill = malloc(body_bytes + 1), *body = malloc(body_bytes + 1024);
  memset(fill, 'a', body_bytes);
  for (int i = 0; i < body_bytes; i += 6) fill[i] = ' ';
  fill[body_bytes > 200 ? body_bytes - 200 : 0] = 0;
  int n = sprintf(body, "{\"model\":\"mock\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"max_tokens\":%d,\"seed\":%d%s}", fill,
                  streams ? events_wanted : 20, interval_us, streams ? ",\"stream\":true" : "");
  request = malloc(n + 512);
  const char *key = getenv("BENCH_KEY");
  request_len = sprintf(request, "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                        "authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s", key ? key : "sk-none", n, body);
}
static double gap_us(void) {
  double mean = rate ? 1e6 / rate : 1e6;
  return random_gaps ? -log(1 - drand48()) * mean : mean;
}
/* A closed loop is counted from an answer to an answer: a server that batches gives many at once, and a window that
 * begins or ends between two batches would count up to one too few or too many. */
static int due(long long now, long long at, int ready) {
  return now >= at && (rate || ready || now >= at + PATIENCE_US);
}
static int order(const void *a, const void *b) { return *(unsigned *)a > *(unsigned *)b ? 1 : -1; }
int main(int argc, char **argv) {
  if (argc != 10 && argc != 11)
    return fprintf(stderr, "usage: load PORT CONNECTIONS unary|stream BODY_BYTES EVENTS INTERVAL_US RATE WARMUP_S WINDOW_S [SEED]\n"), 2;
  port = atoi(argv[1]);
  int connections = atoi(argv[2]), body_bytes = atoi(argv[4]), interval_us = atoi(argv[6]);
  if (connections > CONNECTIONS) return fprintf(stderr, "load: at most %d connections\n", CONNECTIONS), 2;
  streams = !strcmp(argv[3], "stream");
  events_wanted = atoi(argv[5]);
  rate = atof(argv[7]);
  double warmup_s = atof(argv[8]), window_s = atof(argv[9]);
  random_gaps = argc == 11;
  if (random_gaps) srand48(atol(argv[10]));
  samples = malloc(SAMPLES * sizeof *samples);
  prepare(body_bytes, interval_us);
  ep = epoll_create1(0);
  for (int i = 0; i < connections; i++) {
    conns[i].buf = malloc(BUFFER);
    conns[i].fd = -1;
    if (rate) dial(&conns[i]); /* as a pool has them: those dialled while it is late would make a server later still */
    next(&conns[i]);
  }
  double due_us = now_us();
  long long begin = due_us + warmup_s * 1e6, end = begin + window_s * 1e6;
  for (struct epoll_event events[512];;) {
    long long wait = rate ? (long long)due_us - now_us() : 100000;
    struct timespec t = {.tv_nsec = wait < 0 ? 0 : (wait > 100000 ? 100000 : wait) * 1000};
    int ready = epoll_pwait2(ep, events, 512, &t, NULL);
    for (int i = 0; i < ready; i++) arrived(events[i].data.ptr);
    long long now = now_us();
    for (; rate && due_us <= now && idles; due_us += gap_us()) {
      struct conn *c = idle[--idles];
      if (c->fd < 0) dial(c);
      fire(c, due_us);
    }
    if (!counting && due(now, begin, ready)) { counting = 1; errors = 0; begin = now; puts("window"); fflush(stdout); }
    if (counting && due(now, end, ready)) { end = now; break; }
  }
  qsort(samples, sampled, sizeof *samples, order);
  printf("{\"requests\":%ld,\"events\":%ld,\"errors\":%ld,\"event_reads\":%ld,\"reconnects\":%ld,\"seconds\":%.3f,\"p50_us\":%u,\"p99_us\":%u}\n",
         completed, events_seen, errors, event_reads, reconnects, (end - begin) / 1e6, sampled ? samples[sampled / 2] : 0,
         sampled ? samples[sampled * 99 / 100] : 0);
  return 0;
}
