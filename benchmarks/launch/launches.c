// Measures the microseconds of nrt_execute, and in turn the time in which two processes wake each other. `launches NEFF ROUNDS`
// prints two lines for each round: the median of a launch, and the median of an exchange of no data by futex.
//
// The NEFF has inputs and outputs that need no values. As long as another process computes, a launch takes at least as long as
// the exchange.

#define _GNU_SOURCE
#include "../../backend/nrt/nrt_api.h"

#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EACH 2000

#define OK(call)                                                                                      \
    do {                                                                                              \
        const NRT_STATUS status_ = (call);                                                            \
        if (status_ != NRT_SUCCESS) {                                                                 \
            fprintf(stderr, "%s returned %s (%d)\n", #call, nrt_get_status_as_str(status_), status_); \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double) time.tv_sec * 1e6 + (double) time.tv_nsec / 1e3;
}

static int compare(const void * a, const void * b) {
    const double x = *(const double *) a;
    const double y = *(const double *) b;
    return (x > y) - (x < y);
}

// ---- an exchange of no data --------------------------------------------------------------------------------------------

typedef struct {
    _Alignas(64) atomic_int asked;
    _Alignas(64) atomic_int answered;
} line;

static void signal_other(atomic_int * word, int value) {
    atomic_store(word, value);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void wait_for(atomic_int * word, int value) {
    for (int seen = atomic_load(word); seen != value; seen = atomic_load(word)) {
        syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
    }
}

// Starts a process that answers until this process ends.
static line * start_other(void) {
    line * shared = mmap(NULL, sizeof(line), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    const pid_t other = fork();
    if (other < 0) {
        perror("fork");
        exit(1);
    }
    if (other == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int i = 1;; i++) {
            wait_for(&shared->asked, i);
            signal_other(&shared->answered, i);
        }
    }
    return shared;
}

static void exchange(line * shared) {
    const int next = atomic_load(&shared->asked) + 1;
    signal_other(&shared->asked, next);
    wait_for(&shared->answered, next);
}

// ---- launches ----------------------------------------------------------------------------------------------------------

typedef struct {
    nrt_model_t *      model;
    nrt_tensor_set_t * inputs;
    nrt_tensor_set_t * outputs;
} program;

static program load(const char * path) {
    FILE * file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    static char  data[1 << 20];
    const size_t size = fread(data, 1, sizeof(data), file);
    fclose(file);

    program                   made;
    nrt_tensor_info_array_t * info;
    OK(nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", ""));
    OK(nrt_load(data, size, 0, 1, &made.model));
    OK(nrt_get_model_tensor_info(made.model, &info));
    OK(nrt_allocate_tensor_set(&made.inputs));
    OK(nrt_allocate_tensor_set(&made.outputs));
    for (uint64_t i = 0; i < info->tensor_count; i++) {
        const nrt_tensor_info_t * one = &info->tensor_array[i];
        nrt_tensor_t *            tensor;
        OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, one->size, one->name, &tensor));
        nrt_tensor_set_t * set = one->usage == NRT_TENSOR_USAGE_INPUT ? made.inputs : made.outputs;
        OK(nrt_add_tensor_to_tensor_set(set, one->name, tensor));
    }
    return made;
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: launches NEFF ROUNDS\n");
        return 2;
    }
    line * const  other  = start_other();
    const program kernel = load(argv[1]);
    OK(nrt_execute(kernel.model, kernel.inputs, kernel.outputs));  // the first launch takes longer
    for (int round = 0; round < atoi(argv[2]); round++) {
        static double launches[EACH];
        static double exchanges[EACH];
        for (int i = 0; i < EACH; i++) {
            const double begun = now_us();
            OK(nrt_execute(kernel.model, kernel.inputs, kernel.outputs));
            launches[i] = now_us() - begun;
        }
        for (int i = 0; i < EACH; i++) {
            const double begun = now_us();
            exchange(other);
            exchanges[i] = now_us() - begun;
        }
        qsort(launches, EACH, sizeof(double), compare);
        qsort(exchanges, EACH, sizeof(double), compare);
        printf("%.2f %.2f\n", launches[EACH / 2], exchanges[EACH / 2]);
    }
    nrt_close();
    return 0;
}
