/* The least that a server does: an HTTP server that looks at a request only to find its end, as a library.
 *
 * A request's row is the last bytes of its body. A response is the same head for all, and a row of each output.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECTIONS 8192
#define BUFFER 65536
#define EVENTS 512

struct conn { size_t used; int waiting, gone; char bytes[BUFFER + 1]; };
static struct conn *conns[CONNECTIONS]; /* by descriptor */
static char answer[BUFFER];
static size_t head_bytes, row_bytes;
static int ep, listener;
static int queue[CONNECTIONS]; /* descriptors of waiting requests, one for each connection at most: a ring */
static char *rows;
static unsigned first, behind;

static _Noreturn void die(const char *why) {
  fprintf(stderr, "sockets: %s\n", why);
  exit(2);
}
/* How long the request is; 0: it is not all there. */
static size_t whole(struct conn *c) {
  char *end = memmem(c->bytes, c->used, "\r\n\r\n", 4);
  if (!end) return 0;
  char *length = strcasestr(c->bytes, "\r\ncontent-length:");
  size_t n = end + 4 - c->bytes + (length && length < end ? strtoul(length + 17, NULL, 10) : 0);
  if (n > BUFFER || n < row_bytes) die("a request is too long or has no row");
  return n <= c->used ? n : 0;
}
static void arrived(int fd) {
  struct conn *c = conns[fd];
  ssize_t n = read(fd, c->bytes + c->used, BUFFER - c->used);
  if (n <= 0 && c->waiting) { /* its response comes first: the descriptor is not to become another's */
    c->gone = 1;
    epoll_ctl(ep, EPOLL_CTL_DEL, fd, NULL);
    return;
  }
  if (n <= 0) { close(fd); return; }
  c->used += n;
  c->bytes[c->used] = 0;
  size_t size = whole(c);
  if (!size) return;
  if (size < c->used || c->waiting) die("a client does not wait for its response");
  memcpy(rows + behind % CONNECTIONS * row_bytes, c->bytes + size - row_bytes, row_bytes);
  queue[behind++ % CONNECTIONS] = fd;
  c->used = 0;
  c->waiting = 1;
}
static void welcome(void) {
  int one = 1, fd = accept(listener, NULL, NULL);
  if (fd < 0 || fd >= CONNECTIONS) die("too many connections");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (!conns[fd]) conns[fd] = malloc(sizeof *conns[fd]);
  conns[fd]->used = conns[fd]->waiting = conns[fd]->gone = 0;
  struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
  epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
}
void listen_on(int port, const char *head, int bytes, int bytes_of_row) {
  if (bytes > BUFFER / 2) die("the head is too long");
  memcpy(answer, head, head_bytes = bytes);
  rows = malloc(CONNECTIONS * (row_bytes = bytes_of_row));
  int one = 1;
  listener = socket(AF_INET, SOCK_STREAM, 0);
  ep = epoll_create1(0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (void *)&a, sizeof a) || listen(listener, CONNECTIONS)) die("the port is taken");
  struct epoll_event e = {.events = EPOLLIN, .data.fd = listener};
  epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
}
/* Waits for requests; returns how many there are, `most` or fewer, with their rows and descriptors. */
int collect(int most, char *into, int *descriptors) {
  struct epoll_event events[EVENTS];
  do {
    int ready = epoll_wait(ep, events, EVENTS, first == behind ? -1 : 0);
    for (int i = 0; i < ready; i++) {
      if (events[i].data.fd == listener) welcome();
      else arrived(events[i].data.fd);
    }
  } while (first == behind);
  int n = 0;
  for (; n < most && first != behind; n++, first++) {
    memcpy(into + n * row_bytes, rows + first % CONNECTIONS * row_bytes, row_bytes);
    descriptors[n] = queue[first % CONNECTIONS];
  }
  return n;
}
/* Answers so many requests. Each output is an array, of so many bytes a row. */
void respond(int count, const int *descriptors, int outputs, char **arrays, const int *widths) {
  for (int i = 0; i < count; i++) {
    size_t used = head_bytes;
    for (int j = 0; j < outputs; used += widths[j++]) {
      if (used + widths[j] > BUFFER) die("the outputs are too long");
      memcpy(answer + used, arrays[j] + (size_t)i * widths[j], widths[j]);
    }
    ssize_t sent = send(descriptors[i], answer, used, MSG_NOSIGNAL);
    if (sent >= 0 && sent != (ssize_t)used) die("a client does not read");
    conns[descriptors[i]]->waiting = 0;
    if (conns[descriptors[i]]->gone) close(descriptors[i]);
  }
}
