/* NVIDIA's driver library as far as `engines.tensor.gpus` asks it: two GPUs, of which the second has no context. */
#include <stddef.h>
#include <stdlib.h>

static int answer(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

int cuInit(unsigned flags) { (void)flags; return answer("STUB_INIT"); }
int cuDeviceGetCount(int *count) { *count = 2; return answer("STUB_COUNT"); }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device + 1) << 34; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = !device; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = &answer; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxPushCurrent_v2(void *context) { return context == &answer ? 0 : 201; }
int cuCtxPopCurrent_v2(void **context) { *context = &answer; return 0; }
int cuStreamQuery(void *stream) { (void)stream; return answer("STUB_QUERY"); }
