/* Stands in for NVIDIA's libnvidia-ml.so.1: answers what the file named by NVML_STUB says, read anew at each call.
 *
 * Lines are `KEY VALUE`: `count 2`, `init !9`, `0.uuid GPU-a`, `0.temperature 61`, `0.all !15`, `event 0 79`. A value
 * `!N` is an error of NVML; what is not in the file is not supported. Signatures as in NVIDIA's nvml.h. Built with
 * -DOLD it lacks what drivers before 535 lack.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10 };
#define WHOLE 0xFFFFFFFFu
#define SLICES_MAX 16
typedef void *handle;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } busy_t;
typedef struct { handle device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct {
    unsigned id, scope; long long stamp, latency; int type, result;
    union { double d; unsigned u; unsigned long long ull; } value;
} field_t;

static int taken = 0;

/* The value of a key, or NULL; `nth` says which of several lines. */
static const char *value(const char *key, int nth) {
    static char found[256];
    char line[320];
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    const char *answer = NULL;
    if (!file) return NULL;
    while (fgets(line, sizeof line, file)) {
        char *space = strchr(line, ' ');
        if (!space) continue;
        *space = 0;
        if (strcmp(line, key) || nth-- > 0) continue;
        space[1 + strcspn(space + 1, "\n")] = 0;
        strncpy(found, space + 1, sizeof found - 1);
        answer = found;
        break;
    }
    fclose(file);
    return answer;
}

static int number(const char *key, unsigned long long *out) {
    const char *text = value(key, 0);
    if (!text) return NOT_SUPPORTED;
    if (*text == '!') return atoi(text + 1);
    *out = strtoull(text, NULL, 0);
    return OK;
}

/* `0` of a GPU, `0s1` of its second slice. */
static void name_of(handle device, char *out) {
    unsigned long number = (unsigned long)device;
    if (number < 0x100) sprintf(out, "%lu", number - 1);
    else sprintf(out, "%lus%lu", (number >> 8) - 1, number & 0xFF);
}

static int get(handle device, const char *what, unsigned long long *out) {
    char key[64], name[32];
    unsigned long long ignored;
    int all;
    name_of(device, name);
    sprintf(key, "%s.all", name);
    all = number(key, &ignored);
    if (all != NOT_SUPPORTED) return all;
    sprintf(key, "%s.%s", name, what);
    return number(key, out);
}

static int get_text(handle device, const char *what, char *out, unsigned size) {
    char key[64], name[32];
    unsigned long long ignored;
    const char *text;
    int result = get(device, what, &ignored);
    if (result != OK) return result;
    name_of(device, name);
    sprintf(key, "%s.%s", name, what);
    text = value(key, 0);
    snprintf(out, size, "%s", text ? text : "");
    return OK;
}

static int get_unsigned(handle device, const char *what, unsigned *out) {
    unsigned long long found = 0;
    int result = get(device, what, &found);
    *out = (unsigned)found;
    return result;
}

static int numbered(handle device, const char *what, unsigned n, unsigned long long *out) {
    char key[48];
    sprintf(key, "%s%u", what, n);
    return get(device, key, out);
}

int nvmlInitWithFlags(unsigned flags) {
    unsigned long long ignored;
    int result = number("init", &ignored);
    (void)flags;
    return result == NOT_SUPPORTED ? OK : result;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int result) { static char text[32]; sprintf(text, "stub error %d", result); return text; }
int nvmlDeviceGetCount_v2(unsigned *out) {
    unsigned long long n = 0;
    int result = number("count", &n);
    *out = (unsigned)n;
    return result;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *out) {
    unsigned long long ignored;
    *out = (handle)(unsigned long)(index + 1);
    int result = get(*out, "handle", &ignored);
    return result == NOT_SUPPORTED ? OK : result;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, handle *out) {
    unsigned count = 0, index;
    char own[96];
    nvmlDeviceGetCount_v2(&count);
    for (index = 0; index < count; index++) {
        *out = (handle)(unsigned long)(index + 1);
        if (get_text(*out, "uuid", own, sizeof own) == OK && !strcmp(own, uuid)) return OK;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(handle d, char *out, unsigned size) { return get_text(d, "uuid", out, size); }
int nvmlDeviceGetName(handle d, char *out, unsigned size) { return get_text(d, "name", out, size); }
int nvmlDeviceGetPciInfo_v3(handle d, pci_t *out) { return get_text(d, "pci", out->bus_id, sizeof out->bus_id); }
int nvmlDeviceGetMemoryInfo(handle d, memory_t *out) {
    int result = get(d, "memory", &out->total);
    if (result == OK) result = get(d, "used", &out->used);
    return result;
}
int nvmlDeviceGetUtilizationRates(handle d, busy_t *out) { return get_unsigned(d, "busy", &out->gpu); }
int nvmlDeviceGetTemperature(handle d, unsigned sensor, unsigned *out) {
    (void)sensor;
    return get_unsigned(d, "temperature", out);
}
int nvmlDeviceGetPowerUsage(handle d, unsigned *out) { return get_unsigned(d, "power", out); }
int nvmlDeviceGetClockInfo(handle d, unsigned kind, unsigned *out) { (void)kind; return get_unsigned(d, "clock", out); }
int nvmlDeviceGetMaxClockInfo(handle d, unsigned kind, unsigned *out) {
    (void)kind;
    return get_unsigned(d, "clock_max", out);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(handle d, unsigned long long *out) { return get(d, "throttles", out); }
int nvmlDeviceGetTotalEccErrors(handle d, unsigned kind, unsigned counter, unsigned long long *out) {
    (void)kind;
    return get(d, counter ? "ecc_ever" : "ecc", out);
}
int nvmlDeviceGetNvLinkState(handle d, unsigned link, unsigned *out) {
    unsigned long long ignored;
    int result = numbered(d, "link", link, &ignored);
    *out = result == OK;
    return result;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle d, unsigned link, pci_t *out) {
    char what[32];
    sprintf(what, "link%u", link);
    return get_text(d, what, out->bus_id, sizeof out->bus_id);
}
int nvmlDeviceGetMigMode(handle d, unsigned *now, unsigned *pending) {
    unsigned long long n = 0;
    int result = get(d, "mig", &n);
    *now = *pending = n > 0;
    return result;
}
int nvmlDeviceGetMaxMigDeviceCount(handle d, unsigned *out) { (void)d; *out = SLICES_MAX; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(handle d, unsigned place, handle *out) {
    unsigned long long n = 0;
    int result = get(d, "mig", &n);
    if (result != OK || place >= n) return result != OK ? result : NOT_FOUND;
    *out = (handle)(((unsigned long)d << 8) + place);
    return OK;
}
int nvmlDeviceGetGpuInstanceId(handle d, unsigned *out) { return get_unsigned(d, "instance", out); }

#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(handle d, unsigned long long *out) { return get(d, "throttles", out); }
int nvmlDeviceGetNumaNodeId(handle d, unsigned *out) { return get_unsigned(d, "numa", out); }
int nvmlDeviceGetRemappedRows(handle d, unsigned *cor, unsigned *unc, unsigned *pending, unsigned *failed) {
    int result = get_unsigned(d, "pending", pending);
    *cor = *unc = 0;
    if (result == OK) result = get_unsigned(d, "failed", failed);
    return result;
}
int nvmlDeviceGetFieldValues(handle d, int count, field_t *fields) {
    int n;
    for (n = 0; n < count; n++) fields[n].result = get_unsigned(d, "recovery", &fields[n].value.u);
    return OK;
}
int nvmlEventSetCreate(handle *out) { /* what was before is not told */
    for (taken = 0; value("event", taken); taken++) continue;
    *out = (handle)1;
    return OK;
}
int nvmlEventSetFree(handle set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(handle d, unsigned long long types, handle set) {
    unsigned long long ignored;
    int result = get(d, "events", &ignored);
    (void)types, (void)set;
    return result == NOT_SUPPORTED && get(d, "uuid", &ignored) == OK ? OK : result;
}
int nvmlEventSetWait_v2(handle set, event_t *out, unsigned timeout_ms) {
    unsigned index, instance = WHOLE;
    unsigned long long xid;
    const char *text = value("event", taken);
    (void)set, (void)timeout_ms;
    if (!text) return TIMEOUT;
    taken++;
    if (*text == '!') return atoi(text + 1);
    sscanf(text, "%u %llu %u", &index, &xid, &instance);
    out->device = (handle)(unsigned long)(index + 1);
    out->type = 8;
    out->data = xid;
    out->gpu_instance = out->compute_instance = instance;
    return OK;
}
#endif
