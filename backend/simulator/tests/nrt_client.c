// A program that uses libnrt without a framework, and the mistakes that the tests have it make.
//
//     nrt_client run NEFF                 fills the inputs, executes, prints each output
//     nrt_client threads NEFF N COUNT     N threads execute at once, each on its own tensors, and compare their results
//     nrt_client load NEFF                prints the status of nrt_load
//     nrt_client tensors                  tensors, slices, copies, bounds
//     nrt_client sets                     threads put tensors into one set and look them up, on two cores
//     nrt_client sequence NEFF            calls before nrt_init, twice, and after nrt_close, on a trn1.2xlarge
//     nrt_client binding NEFF             tensors that are missing, of the wrong size, freed, on another core
//     nrt_client memory                   runs out of device memory; freed memory is available again
//     nrt_client programs NEFF...         prints the memory in use after each load and after each unload
//     nrt_client cores                    prints the number of cores, total and visible
//     nrt_client hold                     prints the status of nrt_init, and keeps its cores until its input ends
//     nrt_client strict NEFF              calls that only a strict simulator refuses; exit status 0: all were refused
//     nrt_client lenient NEFF             the same calls; exit status 0: all succeeded
//     nrt_client queue NEFF               requests in flight in queues of two places; a launch takes 200 ms
//     nrt_client full NEFF                prints how many requests a queue takes; a launch takes long
//     nrt_client late NEFF                prints the statuses of three requests that are queued at once
//     nrt_client early NEFF               executions, at most two of them in flight; a launch takes some time
//     nrt_client no-queue NEFF            a release without queued requests
//     nrt_client kill NEFF SLOW           ends the helper while it works, and while it does not
//     nrt_client fork NEFF                the calls that a child of fork can make
//     nrt_client timeout SLOW             prints the status of an execution that takes too long
//     nrt_client abandon SLOW             exits without nrt_close while the helper works
//
// NEFF adds two float32 inputs of equal size; SLOW takes long. Exit status 1: a check failed; a message describes it.

#define _GNU_SOURCE
#include "../../nrt/nrt_api.h"

#include <dirent.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void check_failed(const char * file, int line, const char * what, const char * got) {
    fprintf(stderr, "%s:%d: %s: got %s\n", file, line, what, got);
    exit(1);
}

#define EXPECT(status, call)                                                                     \
    do {                                                                                         \
        const NRT_STATUS got_ = (call);                                                          \
        if (got_ != (status)) {                                                                  \
            check_failed(__FILE__, __LINE__, #call " is " #status, nrt_get_status_as_str(got_)); \
        }                                                                                        \
    } while (0)

#define OK(call) EXPECT(NRT_SUCCESS, call)

#define CHECK(condition)                                           \
    do {                                                           \
        if (!(condition)) {                                        \
            check_failed(__FILE__, __LINE__, #condition, "false"); \
        }                                                          \
    } while (0)

static void * read_file(const char * path, size_t * size) {
    FILE * file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    fseek(file, 0, SEEK_END);
    *size       = (size_t) ftell(file);
    void * data = malloc(*size + 1);
    rewind(file);
    CHECK(data != NULL && fread(data, 1, *size, file) == *size);
    fclose(file);
    return data;
}

static NRT_STATUS load_on(const char * path, int32_t core, nrt_model_t ** model) {
    size_t     size;
    void *     neff   = read_file(path, &size);
    NRT_STATUS status = nrt_load(neff, size, core, 1, model);
    free(neff);
    return status;
}

static nrt_model_t * load(const char * path) {
    nrt_model_t * model;
    OK(load_on(path, 0, &model));
    return model;
}

static void init(void) {
    OK(nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", ""));
}

// ---- a model and tensors for it ----------------------------------------------------------------------------------------

#define MAX_TENSORS 80

typedef struct {
    nrt_model_t *             model;
    nrt_tensor_info_array_t * info;
    nrt_tensor_t *            tensors[MAX_TENSORS];
    nrt_tensor_set_t *        inputs;
    nrt_tensor_set_t *        outputs;
} job;

// Element i of input n is a small whole number, so that a sum is exact in any type.
static float element(size_t i, uint64_t n, int seed) {
    return (float) ((i * 7 + n * 3 + (size_t) seed) % 11);
}

static void fill(job * j, int seed) {
    for (uint64_t n = 0; n < j->info->tensor_count; n++) {
        const nrt_tensor_info_t * info = &j->info->tensor_array[n];
        if (info->usage == NRT_TENSOR_USAGE_INPUT && info->dtype == NRT_DTYPE_FLOAT32) {
            float * data = malloc(info->size);
            for (size_t i = 0; i < info->size / sizeof(float); i++) {
                data[i] = element(i, n, seed);
            }
            OK(nrt_tensor_write(j->tensors[n], data, 0, info->size));
            free(data);
        }
    }
}

static job make_job(nrt_model_t * model, int seed) {
    job j = { .model = model };
    OK(nrt_get_model_tensor_info(model, &j.info));
    OK(nrt_allocate_tensor_set(&j.inputs));
    OK(nrt_allocate_tensor_set(&j.outputs));
    CHECK(j.info->tensor_count <= MAX_TENSORS);
    nrt_tensor_t * shared = NULL;
    for (uint64_t n = 0; n < j.info->tensor_count; n++) {
        const nrt_tensor_info_t * info  = &j.info->tensor_array[n];
        const int                 input = info->usage == NRT_TENSOR_USAGE_INPUT;
        if (!input && shared != NULL) {
            // the only result of a kernel that works in place
            OK(nrt_tensor_allocate_slice(shared, 0, info->size, info->name, &j.tensors[n]));
        } else {
            OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, info->size, info->name, &j.tensors[n]));
        }
        OK(nrt_add_tensor_to_tensor_set(input ? j.inputs : j.outputs, info->name, j.tensors[n]));
        if (strstr(info->name, ".must_alias_input") != NULL) {
            shared = j.tensors[n];
        }
    }
    fill(&j, seed);
    return j;
}

static NRT_STATUS execute(job * j) {
    return nrt_execute(j->model, j->inputs, j->outputs);
}

// Returns whether the output is the sum of the two inputs that `fill` wrote.
static int is_sum(job * j, int seed) {
    const nrt_tensor_info_t * out  = &j->info->tensor_array[2];
    float *                   data = malloc(out->size);
    OK(nrt_tensor_read(j->tensors[2], data, 0, out->size));
    int good = 1;
    for (size_t i = 0; i < out->size / sizeof(float); i++) {
        good = good && data[i] == element(i, 0, seed) + element(i, 1, seed);
    }
    free(data);
    return good;
}

static void clear_output(job * j) {
    OK(nrt_tensor_memset(j->tensors[2], 0, 0xff, nrt_tensor_get_size(j->tensors[2])));
}

static void free_job(job * j) {
    for (uint64_t n = 0; n < j->info->tensor_count; n++) {
        nrt_tensor_free(&j->tensors[n]);
        CHECK(j->tensors[n] == NULL);
    }
    nrt_destroy_tensor_set(&j->inputs);
    nrt_destroy_tensor_set(&j->outputs);
    OK(nrt_free_model_tensor_info(j->info));
}

// ---- commands -------------------------------------------------------------------------------------------------------

static void run(const char * path) {
    init();
    nrt_version_t version;
    OK(nrt_get_version(&version, sizeof(version)));
    printf("runtime %llu: %s\n", (unsigned long long) version.rt_major, version.rt_detail);
    job j = make_job(load(path), 0);
    for (uint64_t n = 0; n < j.info->tensor_count; n++) {
        const nrt_tensor_info_t * info = &j.info->tensor_array[n];
        printf("%s %s: type %d, %zu bytes, shape", info->usage == NRT_TENSOR_USAGE_INPUT ? "input" : "output",
               info->name, (int) info->dtype, info->size);
        for (uint32_t d = 0; d < info->ndim; d++) {
            printf(" %u", info->shape[d]);
        }
        printf("\n");
    }
    OK(execute(&j));
    for (uint64_t n = 0; n < j.info->tensor_count; n++) {
        const nrt_tensor_info_t * info = &j.info->tensor_array[n];
        if (info->usage == NRT_TENSOR_USAGE_OUTPUT && info->dtype == NRT_DTYPE_FLOAT32) {
            float * data = malloc(info->size);
            OK(nrt_tensor_read(j.tensors[n], data, 0, info->size));
            printf("%s:", info->name);
            for (size_t i = 0; i < info->size / sizeof(float); i++) {
                printf(" %.9g", data[i]);
            }
            printf("\n");
            free(data);
        }
    }
    OK(nrt_unload(j.model));
    free_job(&j);
    nrt_close();
}

typedef struct {
    nrt_model_t * model;
    int           seed;
    int           count;
} thread_arguments;

static void * thread(void * pointer) {
    const thread_arguments * arguments = pointer;
    job                      j         = make_job(arguments->model, 0);
    for (int i = 0; i < arguments->count; i++) {
        const int seed = arguments->seed * 1000 + i;
        fill(&j, seed);
        clear_output(&j);
        OK(execute(&j));
        CHECK(is_sum(&j, seed));
    }
    free_job(&j);
    return NULL;
}

static void threads(const char * path, int n, int count) {
    init();
    nrt_model_t *    model = load(path);
    pthread_t        all[64];
    thread_arguments arguments[64];
    CHECK(n <= 64);
    for (int i = 0; i < n; i++) {
        arguments[i] = (thread_arguments) { model, i, count };
        CHECK(pthread_create(&all[i], NULL, thread, &arguments[i]) == 0);
    }
    for (int i = 0; i < n; i++) {
        pthread_join(all[i], NULL);
    }
    OK(nrt_unload(model));
    nrt_close();
}

static void tensors(void) {
    init();
    nrt_tensor_t * whole;
    nrt_tensor_t * slice;
    nrt_tensor_t * inner;
    nrt_tensor_t * other = NULL;
    char           data[100];

    EXPECT(NRT_INVALID, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 0, "t", &other));
    EXPECT(NRT_INVALID, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 99, 10, "t", &other));
    EXPECT(NRT_INVALID, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, -1, 10, "t", &other));
    EXPECT(NRT_INVALID, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_VIRTUAL, 0, 10, "t", &other));
    EXPECT(NRT_INVALID, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 10, "t", NULL));
    EXPECT(NRT_INVALID, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_HOST, 0, ((size_t) 4 << 20) + 1, "t", &other));
    CHECK(other == NULL);

    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 100, NULL, &whole));
    CHECK(nrt_tensor_get_size(whole) == 100);
    CHECK(nrt_tensor_get_va(whole) == NULL);
    OK(nrt_tensor_memset(whole, 0, 'w', 100));
    OK(nrt_tensor_allocate_slice(whole, 10, 20, "slice", &slice));
    OK(nrt_tensor_allocate_slice(slice, 5, 15, "inner", &inner));
    CHECK(nrt_tensor_get_size(inner) == 15);
    OK(nrt_tensor_write(inner, "abc", 12, 3));
    OK(nrt_tensor_read(whole, data, 0, 100));
    CHECK(memcmp(data + 26, "wabcw", 5) == 0);

    // Bytes beyond a slice are out of its bounds, even though the allocation goes on.
    EXPECT(NRT_INVALID, nrt_tensor_write(inner, "abcd", 12, 4));
    EXPECT(NRT_INVALID, nrt_tensor_read(slice, data, 21, 0));
    OK(nrt_tensor_read(slice, data, 20, 0));
    EXPECT(NRT_INVALID, nrt_tensor_read(whole, data, 1, (size_t) -1));
    EXPECT(NRT_INVALID, nrt_tensor_read(whole, data, (size_t) -1, 2));
    EXPECT(NRT_INVALID, nrt_tensor_memset(whole, 100, 0, 1));
    EXPECT(NRT_INVALID, nrt_tensor_allocate_slice(slice, 6, 15, "t", &other));
    EXPECT(NRT_INVALID, nrt_tensor_copy(whole, 81, slice, 0, 20));
    EXPECT(NRT_INVALID, nrt_tensor_copy(whole, 0, slice, 0, 21));
    EXPECT(NRT_INVALID, nrt_tensor_read(whole, NULL, 0, 1));

    // The memory lives as long as a slice of it.
    nrt_tensor_free(&whole);
    nrt_tensor_free(&slice);
    memset(data, 0, sizeof(data));
    OK(nrt_tensor_read(inner, data, 12, 3));
    CHECK(memcmp(data, "abc", 3) == 0);

    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_HOST, 0, 64, "host", &other));
    CHECK(nrt_tensor_get_va(other) != NULL);
    OK(nrt_tensor_copy(inner, 12, other, 1, 3));
    CHECK(memcmp((char *) nrt_tensor_get_va(other) + 1, "abc", 3) == 0);

    // Two cores: NEURON_RT_NUM_CORES is 2 in this test.
    nrt_tensor_t * far;
    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 1, 100, "far", &far));
    EXPECT(NRT_INVALID, nrt_tensor_copy(inner, 0, far, 0, 3));
    OK(nrt_tensor_copy(other, 0, far, 0, 3));

    nrt_tensor_set_t * set;
    nrt_tensor_t *     found;
    OK(nrt_allocate_tensor_set(&set));
    OK(nrt_add_tensor_to_tensor_set(set, "a", inner));
    OK(nrt_add_tensor_to_tensor_set(set, "a", far));
    OK(nrt_get_tensor_from_tensor_set(set, "a", &found));
    CHECK(found == far);
    EXPECT(NRT_FAILURE, nrt_get_tensor_from_tensor_set(set, "b", &found));
    char name[300];
    memset(name, 'n', sizeof(name));
    name[299] = '\0';
    EXPECT(NRT_INVALID, nrt_add_tensor_to_tensor_set(set, name, far));
    EXPECT(NRT_INVALID, nrt_add_tensor_to_tensor_set(set, NULL, far));

    // Pointers that the library did not return.
    EXPECT(NRT_INVALID_HANDLE, nrt_tensor_read((nrt_tensor_t *) data, data, 0, 1));
    EXPECT(NRT_INVALID_HANDLE, nrt_tensor_read(NULL, data, 0, 1));
    EXPECT(NRT_INVALID_HANDLE, nrt_add_tensor_to_tensor_set((nrt_tensor_set_t *) data, "a", far));
    EXPECT(NRT_INVALID_HANDLE, nrt_unload((nrt_model_t *) data));
    EXPECT(NRT_INVALID_HANDLE, nrt_execute((nrt_model_t *) data, set, set));
    nrt_tensor_t * freed = far;
    nrt_tensor_free(&far);
    EXPECT(NRT_INVALID_HANDLE, nrt_tensor_read(freed, data, 0, 1));
    CHECK(nrt_tensor_get_size(freed) == 0);
    EXPECT(NRT_INVALID_HANDLE, nrt_get_tensor_from_tensor_set(set, "a", &found));
    nrt_tensor_free(&freed);
    nrt_tensor_free(NULL);
    nrt_destroy_tensor_set(&set);
    nrt_destroy_tensor_set(&set);
    nrt_close();
}

enum { SET_THREADS = 4, SET_NAMES = 500 };

typedef struct {
    int                core;
    int                number;
    nrt_tensor_set_t * set;
} set_user;

static void set_name(char name[32], int thread, int i) {
    snprintf(name, 32, "tensor%d.%d", thread, i);
}

static void * use_set(void * pointer) {
    const set_user * user = pointer;
    nrt_tensor_t *   tensor;
    nrt_tensor_t *   found;
    char             name[32];
    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, user->core, 16, "t", &tensor));
    for (int i = 0; i < SET_NAMES; i++) {
        set_name(name, user->number, i);
        OK(nrt_add_tensor_to_tensor_set(user->set, name, tensor));
        OK(nrt_get_tensor_from_tensor_set(user->set, name, &found));
        CHECK(found == tensor);
        OK(nrt_tensor_write(tensor, name, 0, 8));
    }
    return tensor;
}

static void sets(void) {
    init();
    nrt_tensor_set_t * set;
    OK(nrt_allocate_tensor_set(&set));
    pthread_t      all[SET_THREADS];
    set_user       users[SET_THREADS];
    nrt_tensor_t * tensors[SET_THREADS];
    for (int t = 0; t < SET_THREADS; t++) {
        users[t] = (set_user) { t % 2, t, set };
        CHECK(pthread_create(&all[t], NULL, use_set, &users[t]) == 0);
    }
    for (int t = 0; t < SET_THREADS; t++) {
        CHECK(pthread_join(all[t], (void **) &tensors[t]) == 0);
    }
    for (int t = 0; t < SET_THREADS; t++) {
        for (int i = 0; i < SET_NAMES; i++) {
            char           name[32];
            nrt_tensor_t * found;
            set_name(name, t, i);
            OK(nrt_get_tensor_from_tensor_set(set, name, &found));
            CHECK(found == tensors[t]);
        }
        nrt_tensor_free(&tensors[t]);
    }
    nrt_destroy_tensor_set(&set);
    nrt_close();
}

static void sequence(const char * path) {
    uint32_t           count;
    nrt_tensor_t *     tensor;
    nrt_tensor_set_t * set;
    nrt_model_t *      model;
    EXPECT(NRT_UNINITIALIZED, nrt_get_visible_vnc_count(&count));
    OK(nrt_get_total_vnc_count(&count));
    CHECK(count == 2);
    EXPECT(NRT_UNINITIALIZED, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 1, "t", &tensor));
    EXPECT(NRT_UNINITIALIZED, nrt_allocate_tensor_set(&set));
    EXPECT(NRT_UNINITIALIZED, load_on(path, 0, &model));
    nrt_close();  // nothing is open
    EXPECT(NRT_INVALID, nrt_init(NRT_FRAMEWORK_TYPE_INVALID, "", ""));
    init();
    EXPECT(NRT_INVALID, nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", ""));
    // Structures of another version of the library: the library writes no more than the caller's size.
    nrt_instance_info_t instance = { .family = 77, .size = 77, .arch_name = "untouched" };
    OK(nrt_get_instance_info(&instance, offsetof(nrt_instance_info_t, arch_name)));
    CHECK(instance.family == 2 && instance.size == 1 && strcmp(instance.arch_name, "untouched") == 0);
    OK(nrt_get_instance_info(&instance, sizeof(instance)));
    CHECK(strcmp(instance.arch_name, "simulator") == 0);
    nrt_vnc_memory_stats_t stats = { 77, 77 };
    size_t                 written;
    OK(nrt_get_vnc_memory_stats(0, &stats, sizeof(stats.bytes_used), &written));
    CHECK(written == sizeof(stats.bytes_used) && stats.bytes_used == 0 && stats.bytes_limit == 77);
    nrt_version_t version = { .rt_detail = "untouched" };
    OK(nrt_get_version(&version, sizeof(version.rt_major)));
    CHECK(version.rt_major == 2 && strcmp(version.rt_detail, "untouched") == 0);
    EXPECT(NRT_INVALID, nrt_get_version(NULL, sizeof(version)));

    job j = make_job(load(path), 0);
    OK(execute(&j));
    nrt_close();
    EXPECT(NRT_CLOSED, execute(&j));
    EXPECT(NRT_CLOSED, nrt_unload(j.model));
    EXPECT(NRT_CLOSED, nrt_get_total_vnc_count(&count));
    EXPECT(NRT_CLOSED, nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", ""));
    CHECK(nrt_tensor_get_size(j.tensors[0]) == 0);
    // Cleaning up in the wrong order is harmless.
    free_job(&j);
    nrt_close();
    CHECK(strcmp(nrt_get_status_as_str(NRT_CLOSED), "NRT_CLOSED") == 0);
    CHECK(nrt_get_status_as_str((NRT_STATUS) 12345) != NULL);
}

static void binding(const char * path) {
    init();
    job                       j    = make_job(load(path), 0);
    const nrt_tensor_info_t * info = j.info->tensor_array;
    nrt_tensor_set_t *        bad;
    nrt_tensor_t *            tensor;
    OK(nrt_allocate_tensor_set(&bad));
    OK(nrt_add_tensor_to_tensor_set(bad, info[0].name, j.tensors[0]));
    EXPECT(NRT_FAILURE, nrt_execute(j.model, bad, j.outputs));
    EXPECT(NRT_FAILURE, nrt_execute(j.model, j.inputs, bad));
    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, info[1].size + 4, "large", &tensor));
    OK(nrt_add_tensor_to_tensor_set(bad, info[1].name, tensor));
    EXPECT(NRT_EXEC_BAD_INPUT, nrt_execute(j.model, bad, j.outputs));
    nrt_tensor_free(&tensor);
    EXPECT(NRT_INVALID_HANDLE, nrt_execute(j.model, bad, j.outputs));
    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 1, info[1].size, "far", &tensor));
    OK(nrt_add_tensor_to_tensor_set(bad, info[1].name, tensor));
    EXPECT(NRT_INVALID, nrt_execute(j.model, bad, j.outputs));
    EXPECT(NRT_INVALID_HANDLE, nrt_execute(j.model, NULL, j.outputs));

    // An input in host memory, and one that lies where XLA cannot read it in place.
    nrt_tensor_t * host;
    nrt_tensor_t * room;
    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_HOST, 0, info[1].size, "host", &host));
    OK(nrt_tensor_copy(j.tensors[1], 0, host, 0, info[1].size));
    OK(nrt_add_tensor_to_tensor_set(bad, info[1].name, host));
    OK(nrt_execute(j.model, bad, j.outputs));
    CHECK(is_sum(&j, 0));
    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, info[1].size + 12, "room", &room));
    nrt_tensor_t * odd;
    OK(nrt_tensor_allocate_slice(room, 12, info[1].size, "odd", &odd));
    OK(nrt_add_tensor_to_tensor_set(bad, info[1].name, odd));
    for (int seed = 0; seed < 3; seed++) {
        fill(&j, seed);
        OK(nrt_tensor_copy(j.tensors[1], 0, odd, 0, info[1].size));
        clear_output(&j);
        OK(nrt_execute(j.model, bad, j.outputs));
        CHECK(is_sum(&j, seed));
    }

    // The result overwrites an input: the kernel still reads the old values.
    nrt_tensor_set_t * over;
    OK(nrt_allocate_tensor_set(&over));
    OK(nrt_add_tensor_to_tensor_set(over, info[2].name, j.tensors[0]));
    for (int i = 1; i <= 3; i++) {
        OK(nrt_execute(j.model, j.inputs, over));
        float * sum = malloc(info[0].size);
        OK(nrt_tensor_read(j.tensors[0], sum, 0, info[0].size));
        for (size_t k = 0; k < info[0].size / sizeof(float); k++) {
            CHECK(sum[k] == element(k, 0, 2) + (float) i * element(k, 1, 2));
        }
        free(sum);
    }

    // Two cores.
    nrt_model_t * model;
    OK(load_on(path, 1, &model));
    EXPECT(NRT_INVALID, nrt_execute(model, j.inputs, j.outputs));
    EXPECT(NRT_LOAD_NOT_ENOUGH_NC, load_on(path, 2, &model));
    EXPECT(NRT_INVALID, load_on(path, -2, &model));
    OK(load_on(path, -1, &model));
    OK(nrt_unload(model));
    EXPECT(NRT_INVALID_HANDLE, nrt_unload(model));
    nrt_tensor_info_array_t * none;
    EXPECT(NRT_INVALID_HANDLE, nrt_get_model_tensor_info(model, &none));
    nrt_close();
}

static void memory(void) {
    init();
    nrt_vnc_memory_stats_t stats;
    size_t                 size;
    OK(nrt_get_vnc_memory_stats(0, &stats, sizeof(stats), &size));
    CHECK(size == sizeof(stats) && stats.bytes_used == 0 && stats.bytes_limit == (size_t) 1 << 20);
    EXPECT(NRT_INVALID, nrt_get_vnc_memory_stats(1, &stats, sizeof(stats), &size));
    nrt_tensor_t * parts[16];
    nrt_tensor_t * more = NULL;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 16; i++) {
            OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 1 << 16, "part", &parts[i]));
            OK(nrt_tensor_memset(parts[i], 0, i, 1 << 16));
        }
        EXPECT(NRT_RESOURCE, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 1, "more", &more));
        EXPECT(NRT_RESOURCE, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, (size_t) -1, "huge", &more));
        CHECK(more == NULL);
        OK(nrt_get_vnc_memory_stats(0, &stats, sizeof(stats), NULL));
        CHECK(stats.bytes_used == stats.bytes_limit);
        // Neighbours merge, in any order of the calls.
        nrt_tensor_free(&parts[4]);
        nrt_tensor_free(&parts[6]);
        EXPECT(NRT_RESOURCE, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 3 << 16, "more", &more));
        nrt_tensor_free(&parts[5]);
        OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 3 << 16, "more", &more));
        OK(nrt_tensor_memset(more, 0, 77, 3 << 16));
        for (int i = 0; i < 16; i++) {
            char last = (char) i;
            if (parts[i] != NULL) {
                OK(nrt_tensor_read(parts[i], &last, (1 << 16) - 1, 1));
            }
            CHECK(last == i);
            nrt_tensor_free(&parts[i]);
        }
        nrt_tensor_free(&more);
        OK(nrt_get_vnc_memory_stats(0, &stats, sizeof(stats), NULL));
        CHECK(stats.bytes_used == 0);
    }
    nrt_close();
}

static void print_memory(void) {
    nrt_vnc_memory_stats_t stats;
    OK(nrt_get_vnc_memory_stats(0, &stats, sizeof(stats), NULL));
    printf("%zu\n", stats.bytes_used);
}

static void programs(int n, char ** paths) {
    nrt_model_t * models[16];
    CHECK(n <= 16);
    init();
    for (int i = 0; i < n; i++) {
        const NRT_STATUS status = load_on(paths[i], 0, &models[i]);
        if (status != NRT_SUCCESS) {
            printf("%s ", nrt_get_status_as_str(status));
            models[i] = NULL;
        }
        print_memory();
    }
    for (int i = 0; i < n; i++) {
        if (models[i] != NULL) {
            OK(nrt_unload(models[i]));
        }
        print_memory();
    }
    nrt_close();
}

static void cores(void) {
    const NRT_STATUS status = nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", "");
    uint32_t         total = 0, visible = 0;
    if (status == NRT_SUCCESS) {
        OK(nrt_get_total_vnc_count(&total));
        OK(nrt_get_visible_vnc_count(&visible));
    }
    printf("%s %u %u\n", nrt_get_status_as_str(status), total, visible);
    nrt_close();
}

static void hold(void) {
    printf("%s\n", nrt_get_status_as_str(nrt_init(NRT_FRAMEWORK_TYPE_NO_FW, "", "")));
    fflush(stdout);
    while (getchar() != EOF) {
    }
    nrt_close();
}

// Checks results that overlap an input, a tensor of 4 GiB, and programs that fill the memory and reuse an unloaded
// program's memory.
static void strict(const char * path, int is_strict) {
    const NRT_STATUS refused = is_strict ? NRT_INVALID : NRT_SUCCESS;
    init();
    nrt_vnc_memory_stats_t before, after;
    OK(nrt_get_vnc_memory_stats(0, &before, sizeof(before), NULL));
    nrt_model_t * model = load(path);
    OK(nrt_get_vnc_memory_stats(0, &after, sizeof(after), NULL));
    const size_t first = after.bytes_used - before.bytes_used;
    CHECK(first == (is_strict ? ((size_t) 96 << 20) + ((size_t) 250 << 10) : 0));
    job          j    = make_job(model, 0);
    const size_t size = j.info->tensor_array[2].size;

    nrt_tensor_t * large;
    nrt_tensor_t * out;
    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 3 * size, "large", &large));
    OK(nrt_tensor_allocate_slice(large, 0, size, "in", &j.tensors[0]));
    OK(nrt_add_tensor_to_tensor_set(j.inputs, j.info->tensor_array[0].name, j.tensors[0]));
    const size_t offsets[] = { 0, size / 2, size - 4, size };
    for (int i = 0; i < 4; i++) {
        OK(nrt_tensor_allocate_slice(large, offsets[i], size, "out", &out));
        OK(nrt_add_tensor_to_tensor_set(j.outputs, j.info->tensor_array[2].name, out));
        fill(&j, 0);
        EXPECT(offsets[i] == size ? NRT_SUCCESS : refused, execute(&j));
        nrt_tensor_free(&out);
    }
    // Not aligned to its elements.
    OK(nrt_tensor_allocate_slice(large, size + 2, size, "out", &out));
    OK(nrt_add_tensor_to_tensor_set(j.outputs, j.info->tensor_array[2].name, out));
    EXPECT(refused, execute(&j));
    nrt_tensor_free(&out);

    // A NaN is reported if the user asks for it, and from then on every execution reports it.
    const bool  reports   = is_strict && getenv("NEURON_FAIL_ON_NAN") != NULL;
    const float nan_value = NAN;
    OK(nrt_tensor_allocate_slice(large, size, size, "out", &out));
    OK(nrt_add_tensor_to_tensor_set(j.outputs, j.info->tensor_array[2].name, out));
    for (int i = 0; i < 3; i++) {
        fill(&j, 0);
        if (i == 1) {
            OK(nrt_tensor_write(j.tensors[0], &nan_value, size - sizeof(nan_value), sizeof(nan_value)));
        }
        EXPECT(reports && i > 0 ? NRT_EXEC_COMPLETED_WITH_NUM_ERR : NRT_SUCCESS, execute(&j));
    }
    nrt_tensor_free(&out);

    nrt_tensor_t * huge;
    EXPECT(refused, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, (size_t) 1 << 32, "huge", &huge));
    if (huge != NULL) {
        nrt_tensor_free(&huge);
    }
    OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, ((size_t) 1 << 32) - 1, "less", &huge));
    nrt_tensor_free(&huge);

    // Takes all memory except the room for two programs.
    OK(nrt_get_vnc_memory_stats(0, &after, sizeof(after), NULL));
    const size_t rest = after.bytes_limit - after.bytes_used - 2 * ((size_t) 250 << 10);
    for (size_t taken = 0; taken < rest;) {
        const size_t   part = rest - taken < (size_t) 1 << 31 ? rest - taken : (size_t) 1 << 31;
        nrt_tensor_t * rest_of_it;
        OK(nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, part, "rest", &rest_of_it));
        taken += part;
    }
    // Tensors cannot use the memory of programs.
    nrt_tensor_t * more;
    EXPECT(NRT_RESOURCE, nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, 3 * ((size_t) 250 << 10), "more", &more));
    nrt_model_t * models[3];
    OK(load_on(path, 0, &models[0]));
    OK(load_on(path, 0, &models[1]));
    EXPECT(is_strict ? NRT_RESOURCE : NRT_SUCCESS, load_on(path, 0, &models[2]));
    OK(nrt_unload(models[0]));
    OK(load_on(path, 0, &models[2]));
    nrt_close();
}

// ---- requests in flight ---------------------------------------------------------------------------------------------

static NRT_STATUS schedule(job * j, NRT_STATUS * ret, nrta_seq_t * seq) {
    return nrta_execute_schedule(j->model, j->inputs, j->outputs, 0, ret, seq);
}

static void wait_for(nrta_seq_t seq) {
    bool completed = false;
    while (!completed) {
        OK(nrta_is_completed(seq, &completed));
    }
}

// Returns whether the eventfd is signaled when the request is completed.
static bool notified(nrta_seq_t seq) {
    const int event = eventfd(0, EFD_CLOEXEC);
    OK(nrta_event_register_seq_id_completion(seq, event));
    struct pollfd wanted = { .fd = event, .events = POLLIN };
    bool          completed;
    CHECK(poll(&wanted, 1, 60000) == 1);
    OK(nrta_is_completed(seq, &completed));
    OK(nrta_event_register_seq_id_completion(seq, -1));
    close(event);
    return completed;
}

// Calls that use the memory of a request in flight without waiting for it.
static void refused_in_flight(job * j) {
    nrt_tensor_t * const output = j->tensors[2];
    float                data[2];
    NRT_STATUS           ret;
    nrta_seq_t           seq;
    EXPECT(NRT_INVALID, nrt_tensor_read(output, data, 0, sizeof(data)));
    EXPECT(NRT_INVALID, nrt_tensor_write(j->tensors[0], data, 0, sizeof(data)));
    EXPECT(NRT_INVALID, nrt_tensor_memset(output, 0, 0, sizeof(data)));
    EXPECT(NRT_INVALID, nrt_tensor_copy(output, 0, j->tensors[0], 0, sizeof(data)));
    EXPECT(NRT_INVALID, execute(j));
    EXPECT(NRT_INVALID, nrta_tensor_read(data, output, 0, sizeof(data), 0, &ret, &seq));
    EXPECT(NRT_INVALID, nrta_tensor_write(j->tensors[0], data, 0, sizeof(data), 1, &ret, &seq));
    EXPECT(NRT_INVALID, nrta_tensor_copy(j->tensors[0], 0, output, 0, sizeof(data), 0, &ret, &seq));
    OK(nrt_tensor_read(j->tensors[0], data, 0, sizeof(data)));  // both read
}

static void queue_transfers(job * j) {
    const size_t size = j->info->tensor_array[0].size;
    char *       sent = malloc(size);
    char *       got  = malloc(size);
    memset(sent, 7, size);
    NRT_STATUS rets[3];
    nrta_seq_t seqs[3];
    OK(nrta_tensor_write(j->tensors[0], sent, 0, size, 1, &rets[0], &seqs[0]));
    wait_for(seqs[0]);
    OK(nrta_tensor_copy(j->tensors[0], 0, j->tensors[1], 0, size, 0, &rets[1], &seqs[1]));
    OK(nrta_tensor_read(got, j->tensors[1], 0, size, 0, &rets[2], &seqs[2]));  // after it in its queue
    wait_for(seqs[2]);
    CHECK(rets[0] == NRT_SUCCESS && rets[1] == NRT_SUCCESS && rets[2] == NRT_SUCCESS);
    CHECK(memcmp(sent, got, size) == 0);
    CHECK(NRTA_SEQ_GET_XU_ID(seqs[0]) != NRTA_SEQ_GET_XU_ID(seqs[1]) && seqs[2] == seqs[1] + 1);
    EXPECT(NRT_INVALID, nrta_tensor_read(got, j->tensors[1], 0, size, 2, &rets[0], &seqs[0]));
    free(sent);
    free(got);
}

static void queue(const char * path) {
    init();
    job        j       = make_job(load(path), 5);
    NRT_STATUS rets[3] = { (NRT_STATUS) 4711, (NRT_STATUS) 4711, (NRT_STATUS) 4711 };
    nrta_seq_t seqs[3];
    nrta_seq_t last;
    bool       completed;
    OK(nrta_get_sequence(0, NRTA_XU_COMPUTE, 0, &last));
    CHECK(NRTA_SEQ_GET_SEQ_NUM(last) == 0);
    OK(schedule(&j, &rets[0], &seqs[0]));
    OK(nrta_is_completed(seqs[0], &completed));
    CHECK(!completed && rets[0] == (NRT_STATUS) 4711);
    refused_in_flight(&j);
    OK(schedule(&j, &rets[1], &seqs[1]));
    EXPECT(NRT_QUEUE_FULL, schedule(&j, &rets[2], &seqs[2]));
    CHECK(notified(seqs[1]) && notified(seqs[0]));
    CHECK(rets[0] == NRT_SUCCESS && rets[1] == NRT_SUCCESS && rets[2] == (NRT_STATUS) 4711);
    OK(nrta_get_sequence(0, NRTA_XU_COMPUTE, 0, &last));
    CHECK(last == seqs[1] && seqs[1] == seqs[0] + 1);
    CHECK(is_sum(&j, 5));

    EXPECT(NRT_INVALID, nrta_is_completed(seqs[1] + 1, &completed));
    EXPECT(NRT_INVALID, nrta_event_register_seq_id_completion(seqs[1], 9999));
    EXPECT(NRT_INVALID, nrta_event_register_seq_id_completion(seqs[1] + 1, -1));
    EXPECT(NRT_INVALID, nrta_execute_schedule(j.model, j.inputs, j.outputs, 1, &rets[0], &seqs[0]));
    EXPECT(NRT_INVALID, nrta_get_sequence(1, NRTA_XU_COMPUTE, 0, &last));
    queue_transfers(&j);

    // Frees a tensor that a request in flight uses.
    OK(schedule(&j, &rets[0], &seqs[0]));
    nrt_tensor_free(&j.tensors[2]);
    wait_for(seqs[0]);
    CHECK(rets[0] == NRT_INVALID_HANDLE);
    free_job(&j);
    nrt_close();
}

static void full(const char * path) {
    init();
    job        j = make_job(load(path), 5);
    NRT_STATUS rets[100];
    nrta_seq_t seq = 0;
    int        n   = 0;
    while (n < 100 && schedule(&j, &rets[n], &seq) == NRT_SUCCESS) {
        n++;
    }
    printf("%d\n", n);
    nrt_close();
}

static void late(const char * path) {
    init();
    job        j = make_job(load(path), 5);
    NRT_STATUS rets[3];
    nrta_seq_t seq = 0;
    for (int i = 0; i < 3; i++) {
        OK(schedule(&j, &rets[i], &seq));
    }
    const int event = eventfd(0, EFD_CLOEXEC);
    OK(nrta_event_register_seq_id_completion(seq, event));  // stays registered
    close(event);
    wait_for(seq);
    for (int i = 0; i < 3; i++) {
        printf("%s ", nrt_get_status_as_str(rets[i]));
    }
    printf("%s\n", nrt_get_status_as_str(schedule(&j, &rets[0], &seq)));
    nrt_close();
}

static void no_queue(const char * path) {
    init();
    job        j = make_job(load(path), 5);
    NRT_STATUS ret;
    nrta_seq_t seq;
    EXPECT(NRT_FAILURE, schedule(&j, &ret, &seq));
    OK(execute(&j));
    CHECK(is_sum(&j, 5));
    nrt_close();
}

// nrt_execute returns before the execution is done, up to two of them.
static void early(const char * path) {
    init();
    job   j = make_job(load(path), 5);
    float first;
    clear_output(&j);
    OK(execute(&j));
    OK(execute(&j));
    EXPECT(NRT_QUEUE_FULL, execute(&j));
    EXPECT(NRT_INVALID, nrt_tensor_read(j.tensors[2], &first, 0, sizeof(first)));
    while (nrt_tensor_read(j.tensors[2], &first, 0, sizeof(first)) != NRT_SUCCESS) {
        const struct timespec some = { 0, 10000000 };
        nanosleep(&some, NULL);
    }
    CHECK(is_sum(&j, 5));
    free_job(&j);
    nrt_close();
}

static pid_t helper_pid(void) {
    pid_t           found = 0;
    DIR *           proc  = opendir("/proc");
    struct dirent * entry;
    while ((entry = readdir(proc)) != NULL) {
        char path[300];
        char text[1000] = { 0 };
        snprintf(path, sizeof(path), "/proc/%s/stat", entry->d_name);
        FILE * file = atoi(entry->d_name) > 0 ? fopen(path, "r") : NULL;
        if (file == NULL) {
            continue;
        }
        const size_t size = fread(text, 1, sizeof(text) - 1, file);
        const char * end  = strrchr(text, ')');
        int          parent;
        char         state;
        if (size > 0 && end != NULL && sscanf(end + 1, " %c %d", &state, &parent) == 2 && parent == getpid() &&
            state != 'Z') {
            CHECK(found == 0);
            found = atoi(entry->d_name);
        }
        fclose(file);
    }
    closedir(proc);
    CHECK(found != 0);
    return found;
}

static void sleep_ms(int ms) {
    const struct timespec time = { ms / 1000, ms % 1000 * 1000000L };
    nanosleep(&time, NULL);
}

// Returns how many of a process's threads are running or runnable.
static int busy_threads(pid_t process) {
    char folder[100];
    snprintf(folder, sizeof(folder), "/proc/%d/task", (int) process);
    DIR * tasks = opendir(folder);
    CHECK(tasks != NULL);
    int             busy = 0;
    struct dirent * entry;
    while ((entry = readdir(tasks)) != NULL) {
        char path[400];
        char text[1000] = { 0 };
        snprintf(path, sizeof(path), "%s/%s/stat", folder, entry->d_name);
        FILE * file = entry->d_name[0] != '.' ? fopen(path, "r") : NULL;
        if (file != NULL) {
            const size_t size = fread(text, 1, sizeof(text) - 1, file);
            const char * end  = strrchr(text, ')');
            busy += size > 0 && end != NULL && strncmp(end, ") R", 3) == 0;
            fclose(file);
        }
    }
    closedir(tasks);
    return busy;
}

#define WAITING 3

// Kills the helper when it computes for all waiting threads. Earlier, a request that it did not read would go to the
// next helper.
static void * kill_when_busy(void * unused) {
    (void) unused;
    const pid_t helper = helper_pid();
    for (int seen = 0; seen < 20; seen = busy_threads(helper) >= WAITING ? seen + 1 : 0) {
        sleep_ms(10);
    }
    kill(helper, SIGKILL);
    return NULL;
}

static void * execute_and_fail(void * j) {
    EXPECT(NRT_HW_ERROR, execute(j));
    return NULL;
}

static void kill_helper(const char * path, const char * slow_path) {
    init();
    job j    = make_job(load(path), 0);
    job slow = make_job(load(slow_path), 0);
    OK(execute(&j));
    const pid_t first = helper_pid();

    // Several threads wait for the helper: all get the error, and one new helper starts.
    pthread_t killer;
    pthread_t others[WAITING - 1];
    CHECK(pthread_create(&killer, NULL, kill_when_busy, NULL) == 0);
    for (int i = 0; i < WAITING - 1; i++) {
        CHECK(pthread_create(&others[i], NULL, execute_and_fail, &slow) == 0);
    }
    execute_and_fail(&slow);
    for (int i = 0; i < WAITING - 1; i++) {
        pthread_join(others[i], NULL);
    }
    pthread_join(killer, NULL);

    fill(&j, 5);
    clear_output(&j);
    OK(execute(&j));
    CHECK(is_sum(&j, 5));
    CHECK(helper_pid() != first);

    // A helper that ends while it is idle is replaced, and the client does not notice.
    kill(helper_pid(), SIGKILL);
    sleep_ms(100);
    fill(&j, 6);
    OK(execute(&j));
    CHECK(is_sum(&j, 6));

    kill(helper_pid(), SIGKILL);
    sleep_ms(100);
    OK(nrt_unload(slow.model));
    OK(nrt_unload(j.model));
    job again = make_job(load(path), 9);
    OK(execute(&again));
    CHECK(is_sum(&again, 9));
    nrt_close();
    CHECK(waitpid(-1, NULL, WNOHANG) == -1);  // no child is left, not even a zombie
}

static void fork_process(const char * path) {
    init();
    job j = make_job(load(path), 0);
    OK(execute(&j));
    const pid_t child = fork();
    if (child == 0) {
        uint32_t count;
        OK(nrt_get_total_vnc_count(&count));
        EXPECT(NRT_UNINITIALIZED, nrt_get_visible_vnc_count(&count));
        EXPECT(NRT_UNINITIALIZED, execute(&j));
        init();
        EXPECT(NRT_INVALID_HANDLE, execute(&j));
        EXPECT(NRT_INVALID_HANDLE, nrt_tensor_write(j.tensors[0], "x", 0, 1));
        job own = make_job(load(path), 3);
        OK(execute(&own));
        CHECK(is_sum(&own, 3));
        nrt_close();
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    clear_output(&j);
    OK(execute(&j));
    CHECK(is_sum(&j, 0));

    // A surviving child of fork does not keep the parent's helper alive.
    const pid_t helper = helper_pid();
    const pid_t idle   = fork();
    if (idle == 0) {
        sleep_ms(20000);
        _exit(0);
    }
    nrt_close();
    CHECK(kill(helper, 0) != 0);
    kill(idle, SIGKILL);
    waitpid(idle, NULL, 0);
}

static void timeout(const char * path) {
    init();
    job j = make_job(load(path), 0);
    printf("%s\n", nrt_get_status_as_str(execute(&j)));
    nrt_close();
}

static void * execute_slowly(void * j) {
    execute(j);
    return NULL;
}

static void abandon(const char * path) {
    init();
    job       j = make_job(load(path), 0);
    pthread_t worker;
    CHECK(pthread_create(&worker, NULL, execute_slowly, &j) == 0);
    sleep_ms(300);
    printf("%d\n", (int) helper_pid());
    fflush(stdout);
    _exit(0);
}

int main(int argc, char ** argv) {
    const char * command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "run") == 0 && argc == 3) {
        run(argv[2]);
    } else if (strcmp(command, "threads") == 0 && argc == 5) {
        threads(argv[2], atoi(argv[3]), atoi(argv[4]));
    } else if (strcmp(command, "load") == 0 && argc == 3) {
        nrt_model_t * model;
        init();
        const NRT_STATUS status = load_on(argv[2], 0, &model);
        printf("%s\n", nrt_get_status_as_str(status));
        EXPECT(status, load_on(argv[2], 0, &model));  // a load that fails changes nothing
        nrt_close();
    } else if (strcmp(command, "tensors") == 0 && argc == 2) {
        tensors();
    } else if (strcmp(command, "sets") == 0 && argc == 2) {
        sets();
    } else if (strcmp(command, "sequence") == 0 && argc == 3) {
        sequence(argv[2]);
    } else if (strcmp(command, "binding") == 0 && argc == 3) {
        binding(argv[2]);
    } else if (strcmp(command, "memory") == 0 && argc == 2) {
        memory();
    } else if (strcmp(command, "programs") == 0 && argc > 2) {
        programs(argc - 2, argv + 2);
    } else if (strcmp(command, "cores") == 0 && argc == 2) {
        cores();
    } else if (strcmp(command, "hold") == 0 && argc == 2) {
        hold();
    } else if (strcmp(command, "strict") == 0 && argc == 3) {
        strict(argv[2], 1);
    } else if (strcmp(command, "lenient") == 0 && argc == 3) {
        strict(argv[2], 0);
    } else if (strcmp(command, "queue") == 0 && argc == 3) {
        queue(argv[2]);
    } else if (strcmp(command, "full") == 0 && argc == 3) {
        full(argv[2]);
    } else if (strcmp(command, "late") == 0 && argc == 3) {
        late(argv[2]);
    } else if (strcmp(command, "early") == 0 && argc == 3) {
        early(argv[2]);
    } else if (strcmp(command, "no-queue") == 0 && argc == 3) {
        no_queue(argv[2]);
    } else if (strcmp(command, "kill") == 0 && argc == 4) {
        kill_helper(argv[2], argv[3]);
    } else if (strcmp(command, "fork") == 0 && argc == 3) {
        fork_process(argv[2]);
    } else if (strcmp(command, "timeout") == 0 && argc == 3) {
        timeout(argv[2]);
    } else if (strcmp(command, "abandon") == 0 && argc == 3) {
        abandon(argv[2]);
    } else {
        fprintf(stderr, "see the beginning of %s\n", __FILE__);
        return 2;
    }
    return 0;
}
