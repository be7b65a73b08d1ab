/* A model server that costs next to nothing: one thread, epoll, several ports (one replica each).
 *
 * POST with "stream":true  -> "max_tokens" server-sent events, one write each, "seed" microseconds apart, then [DONE]
 *                             (some routers write the request anew, with "max_completion_tokens" instead);
 * any other POST           -> a chat completion with a body of 1 KB;
 * GET /load                -> the load report that a Forebay gateway asks for;
 * GET /stats               -> how many connections and requests were seen (does the proxy keep connections alive?).
 * usage: mock FIRST_PORT PORTS
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 8192
#define BUFFER 262144
#define AGAIN_US 500

struct conn {
  int fd, port, open, left, interval_us, heap_at;
  long long due_us;
  size_t used, unsent;
  char *buf, out[2048];
};
static struct conn conns[CONNECTIONS];
static struct conn *heap[CONNECTIONS];
static int heap_size, first_port;
static long accepted, requests;
static char unary[2048], *filler;
static int unary_len;

static long long now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}
static void heap_set(int i, struct conn *c) { heap[i] = c; c->heap_at = i; }
static void heap_up(int i) {
  struct conn *c = heap[i];
  while (i && heap[(i - 1) / 2]->due_us > c->due_us) { heap_set(i, heap[(i - 1) / 2]); i = (i - 1) / 2; }
  heap_set(i, c);
}
static void heap_down(int i) {
  struct conn *c = heap[i];
  for (;;) {
    int k = 2 * i + 1;
    if (k >= heap_size) break;
    if (k + 1 < heap_size && heap[k + 1]->due_us < heap[k]->due_us) k++;
    if (heap[k]->due_us >= c->due_us) break;
    heap_set(i, heap[k]);
    i = k;
  }
  heap_set(i, c);
}
static void heap_remove(struct conn *c) {
  int i = c->heap_at;
  if (i < 0) return;
  c->heap_at = -1;
  struct conn *last = heap[--heap_size];
  if (last == c) return;
  heap_set(i, last);
  heap_up(i);
  heap_down(last->heap_at);
}
static void heap_add(struct conn *c) { heap_set(heap_size++, c); heap_up(c->heap_at); }

static void drop(struct conn *c) {
  heap_remove(c);
  close(c->fd);
  c->open = 0;
}
static int flush(struct conn *c) {
  while (c->open && c->unsent) {
    ssize_t n = write(c->fd, c->out, c->unsent);
    if (n < 0 && errno == EAGAIN) return 0;
    if (n < 0) drop(c);
    else memmove(c->out, c->out + n, c->unsent -= n);
  }
  return c->open;
}
/* Write, and keep what the kernel does not take: a proxy that is held up must not lose a stream. */
static void put(struct conn *c, const char *data, size_t length) {
  ssize_t n = c->unsent ? 0 : write(c->fd, data, length);
  if (n < 0 && errno == EAGAIN) n = 0;
  if (n < 0 || c->unsent + length - n > sizeof c->out) return drop(c);
  memcpy(c->out + c->unsent, data + n, length - n);
  c->unsent += length - n;
}
static long number(const char *body, size_t n, const char *key, long otherwise) {
  char *at = memmem(body, n, key, strlen(key));
  if (!at) return otherwise;
  at += strlen(key);
  while (at < body + n && (*at == ' ' || *at == ':' || *at == '"')) at++;
  return atol(at);
}
static void event(struct conn *c) {
  if (!flush(c)) {
    if (!c->open) return;
    c->due_us = now_us() + AGAIN_US;
    return heap_down(c->heap_at);
  }
  if (c->left == 0) return heap_remove(c);
  char data[512], chunk[600];
  int n = snprintf(data, sizeof data,
                   "data: {\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,"
                   "\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" %016lld\"},"
                   "\"logprobs\":null,\"finish_reason\":null}]}\n\n", now_us());
  int m = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", n, data);
  put(c, chunk, m);
  if (!c->open) return;
  if (--c->left > 0) {
    c->due_us += c->interval_us;
    heap_down(c->heap_at);
  } else {
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\nx-forebay-usage: 10,20,0\r\n\r\n";
    put(c, end, sizeof end - 1);
    if (c->open && !c->unsent) heap_remove(c);
  }
}
static void text(struct conn *c, const char *body) {
  char out[2048];
  put(c, out, snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                       strlen(body), body));
}
static void get(struct conn *c) {
  char body[1024];
  if (!strncmp(c->buf, "GET /load", 9))
    snprintf(body, sizeof body, "{\"replica\":\"mock-%d\",\"generation\":1,\"model\":\"mock\",\"revision\":\"r-0\","
             "\"state\":\"ready\",\"capacity\":100000}", c->port - first_port);
  else if (!strncmp(c->buf, "GET /stats", 10))
    snprintf(body, sizeof body, "{\"accepted\":%ld,\"requests\":%ld}", accepted, requests);
  else if (!strncmp(c->buf, "GET /v1/models", 14))
    snprintf(body, sizeof body, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"owned_by\":\"mock\"}]}");
  else
    snprintf(body, sizeof body, "{\"status\":\"ok\",\"model_path\":\"mock\",\"is_generation\":true,\"served_model_name\":\"mock\"}");
  text(c, body);
}
/* Answer every complete request in the buffer. */
static void serve(struct conn *c) {
  while (c->open && c->left == 0) {
    char *end = memmem(c->buf, c->used, "\r\n\r\n", 4);
    if (!end) return;
    size_t head = end + 4 - c->buf, length = 0;
    *end = 0;
    char *field = strcasestr(c->buf, "\r\ncontent-length:");
    int chunked = strcasestr(c->buf, "\r\ntransfer-encoding: chunked") != NULL;
    int expects = strcasestr(c->buf, "\r\nexpect: 100-continue") != NULL;
    *end = '\r';
    if (field) length = atol(field + 17);
    size_t whole = head + length;
    if (chunked) { /* the last chunk ends the body: enough for the proxies measured here */
      char *last = memmem(c->buf + head, c->used - head, "\r\n0\r\n\r\n", 7);
      if (!last) return;
      whole = last + 7 - c->buf;
      length = whole - head;
    }
    if (c->used < whole) {
      if (expects && c->used == head) put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
      return;
    }
    const char *body = c->buf + head;
    if (c->buf[0] == 'G') get(c);
    else {
      requests++;
      if (memmem(body, length, "\"stream\":true", 13) || memmem(body, length, "\"stream\": true", 14)) {
        static const char start[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        c->left = number(body, length, "\"max_tokens\"", number(body, length, "\"max_completion_tokens\"", 20));
        c->interval_us = number(body, length, "\"seed\"", 1000);
        c->due_us = now_us() + c->interval_us;
        put(c, start, sizeof start - 1);
        if (c->open) heap_add(c);
      } else put(c, unary, unary_len);
    }
    if (!c->open) return;
    memmove(c->buf, c->buf + whole, c->used - whole);
    c->used -= whole;
  }
}
static void arrive(int ep, int listener, int port) {
  int fd, one = 1;
  while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    if (fd >= CONNECTIONS) { close(fd); continue; }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    char *buf = conns[fd].buf ? conns[fd].buf : malloc(BUFFER);
    conns[fd] = (struct conn){.fd = fd, .port = port, .open = 1, .heap_at = -1, .buf = buf};
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
    accepted++;
  }
}
static void arrived(struct conn *c) {
  ssize_t n = read(c->fd, c->buf + c->used, BUFFER - c->used);
  if (n <= 0) {
    if (n == 0 || (errno != EAGAIN && errno != EINTR)) drop(c);
    return;
  }
  c->used += n;
  serve(c);
}
int main(int argc, char **argv) {
  if (argc != 3) return fprintf(stderr, "usage: mock FIRST_PORT PORTS\n"), 2;
  signal(SIGPIPE, SIG_IGN);
  first_port = atoi(argv[1]);
  int ports = atoi(argv[2]), ep = epoll_create1(0), one = 1, listeners[64];
  filler = malloc(1024);
  memset(filler, 'x', 780);
  filler[780] = 0;
  char body[1200];
  int n = snprintf(body, sizeof body, "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":"
                   "\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%s\"},\"finish_reason\":\"stop\"}],"
                   "\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":20,\"total_tokens\":30}}", filler);
  unary_len = snprintf(unary, sizeof unary, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-forebay-usage: 10,20,0\r\n"
                       "content-length: %d\r\n\r\n%s", n, body);
  for (int i = 0; i < ports; i++) {
    int fd = listeners[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(first_port + i), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (void *)&a, sizeof a) || listen(fd, 4096)) return perror("listen"), 1;
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
  }
  puts("listening");
  fflush(stdout);
  for (struct epoll_event events[512];;) {
    long long wait = heap_size ? heap[0]->due_us - now_us() : 1000000;
    struct timespec t = {.tv_sec = 0, .tv_nsec = wait < 0 ? 0 : (wait > 900000 ? 900000 : wait) * 1000};
    int ready = epoll_pwait2(ep, events, 512, &t, NULL);
    for (int i = 0; i < ready; i++) {
      int fd = events[i].data.fd, k;
      for (k = 0; k < ports && listeners[k] != fd; k++);
      if (k < ports) arrive(ep, fd, first_port + k);
      else if (conns[fd].open) arrived(&conns[fd]);
    }
    for (long long t_us = now_us(); heap_size && heap[0]->due_us <= t_us;) {
      struct conn *c = heap[0];
      event(c);
      if (c->open && c->left == 0) serve(c);
    }
  }
}
