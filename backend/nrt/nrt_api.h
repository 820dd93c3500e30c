// The part of libnrt's ABI that this project uses: types, status codes and functions of the AWS Neuron Runtime.
//
// The project binds libnrt (`libnrt.so.1`) at run time and links to nothing. These are the project's own declarations,
// written from AWS's published documentation of the library; the project neither needs nor includes AWS's headers. The
// simulator (backend/simulator) implements the same functions.
//
// The lists at the end name every function once, for code that binds them:
//
//     #define X(name) decltype(&::name) name;
//     struct { NRT_FUNCTIONS_REQUIRED(X) NRT_FUNCTIONS_OPTIONAL(X) } nrt;
//     #undef X

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The status of a call. The numbers are the ABI's.
typedef enum {
    NRT_SUCCESS                     = 0,
    NRT_FAILURE                     = 1,  // no reason given; also: a set has no tensor of this name
    NRT_INVALID                     = 2,  // an invalid argument: out of bounds, wrong core, wrong size
    NRT_INVALID_HANDLE              = 3,
    NRT_RESOURCE                    = 4,  // out of device memory or of another resource of the device
    NRT_TIMEOUT                     = 5,
    NRT_HW_ERROR                    = 6,
    NRT_QUEUE_FULL                  = 7,
    NRT_LOAD_NOT_ENOUGH_NC          = 9,  // a NEFF requires more cores than there are
    NRT_UNSUPPORTED_NEFF_VERSION    = 10,
    NRT_FAIL_HOST_MEM_ALLOC         = 11,
    NRT_UNINITIALIZED               = 13,  // call nrt_init first
    NRT_CLOSED                      = 14,  // nrt_close was called before
    NRT_QUEUE_EMPTY                 = 15,
    NRT_EXEC_UNIT_UNRECOVERABLE     = 101,
    NRT_EXEC_BAD_INPUT              = 1002,
    NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003,
    NRT_EXEC_COMPLETED_WITH_ERR     = 1004,
    NRT_EXEC_NC_BUSY                = 1005,
    NRT_EXEC_OOB                    = 1006,
    NRT_EXEC_HW_ERR_COLLECTIVES     = 1200,  // ranks wait for a rank that failed
} NRT_STATUS;

typedef enum {
    NRT_FRAMEWORK_TYPE_INVALID = 0,
    NRT_FRAMEWORK_TYPE_NO_FW   = 1,  // a program that calls the library itself
} nrt_framework_type_t;

typedef enum {
    NRT_TENSOR_PLACEMENT_DEVICE  = 0,
    NRT_TENSOR_PLACEMENT_HOST    = 1,  // deprecated
    NRT_TENSOR_PLACEMENT_VIRTUAL = 2,  // no memory of its own
} nrt_tensor_placement_t;

typedef enum {
    NRT_TENSOR_USAGE_INPUT  = 0,
    NRT_TENSOR_USAGE_OUTPUT = 1,
} nrt_tensor_usage_t;

typedef enum {
    NRT_DTYPE_UNKNOWN  = 0,
    NRT_DTYPE_UINT64   = 1,
    NRT_DTYPE_INT8     = 2,
    NRT_DTYPE_UINT8    = 3,
    NRT_DTYPE_INT16    = 4,
    NRT_DTYPE_UINT16   = 5,
    NRT_DTYPE_BFLOAT16 = 6,
    NRT_DTYPE_FLOAT16  = 7,
    NRT_DTYPE_INT32    = 8,
    NRT_DTYPE_UINT32   = 9,
    NRT_DTYPE_FLOAT32  = 10,
    NRT_DTYPE_INT64    = 12,
    NRT_DTYPE_FP8_E3   = 13,
    NRT_DTYPE_FP8_E4   = 14,
    NRT_DTYPE_FP8_E5   = 15,
} nrt_dtype_t;

typedef struct nrt_model      nrt_model_t;       // a NEFF, loaded
typedef struct nrt_tensor     nrt_tensor_t;      // memory, or a view of another tensor's memory
typedef struct nrt_tensor_set nrt_tensor_set_t;  // tensors by name: the inputs or the outputs of a launch

#define NRT_TENSOR_NAME_MAX 256

// An input or output of a model.
typedef struct {
    char               name[NRT_TENSOR_NAME_MAX];
    nrt_tensor_usage_t usage;
    size_t             size;   // bytes
    nrt_dtype_t        dtype;
    uint32_t *         shape;  // ndim numbers, slowest dimension first
    uint32_t           ndim;
} nrt_tensor_info_t;

// Has tensor_count elements; nrt_free_model_tensor_info frees it.
typedef struct {
    uint64_t                        tensor_count;
    __extension__ nrt_tensor_info_t tensor_array[];  // a flexible array, in C++ an extension
} nrt_tensor_info_array_t;

typedef struct {
    uint64_t rt_major;
    uint64_t rt_minor;
    uint64_t rt_patch;
    uint64_t rt_maintenance;
    char     rt_detail[128];
    char     git_hash[64];
} nrt_version_t;

// Later versions may append fields: the caller and the library exchange the sizes of their structs.
typedef struct {
    size_t bytes_used;
    size_t bytes_limit;
} nrt_vnc_memory_stats_t;

// Values in nrt_instance_info_t for an unknown family or size. The table of targets has the other values.
#define NRT_INSTANCE_UNKNOWN      0
#define NRT_INSTANCE_SIZE_UNKNOWN 9

// Later versions may also append fields here. Libraries of 2023 and before have only the first two fields.
typedef struct {
    uint32_t family;
    uint32_t size;
    char     arch_name[16];
    char     device_revision[8];
} nrt_instance_info_t;

// ---- process: once each, before and after everything else --------------------------------------------------------------

NRT_STATUS   nrt_init(nrt_framework_type_t framework, const char * fw_version, const char * fal_version);
void         nrt_close(void);
const char * nrt_get_status_as_str(NRT_STATUS status);
NRT_STATUS   nrt_get_version(nrt_version_t * version, size_t size);

// A VNC is a virtual (logical) NeuronCore. The total is the instance's, and available before nrt_init; visible VNCs are
// this process's.
NRT_STATUS nrt_get_total_vnc_count(uint32_t * count);
NRT_STATUS nrt_get_visible_vnc_count(uint32_t * count);
NRT_STATUS nrt_get_vnc_memory_stats(uint32_t                 vnc,
                                    nrt_vnc_memory_stats_t * stats,
                                    size_t                   stats_size_in,
                                    size_t *                 stats_size_out);
NRT_STATUS nrt_get_instance_info(nrt_instance_info_t * info, size_t size);

// Physical cores per VNC (nec.h).
NRT_STATUS nec_get_virtual_core_size(uint32_t * size);

// ---- models ------------------------------------------------------------------------------------------------------------

// start_vnc -1: the library chooses; vnc_count -1: as many as the NEFF requires.
NRT_STATUS nrt_load(const void * neff, size_t size, int32_t start_vnc, int32_t vnc_count, nrt_model_t ** model);
NRT_STATUS nrt_unload(nrt_model_t * model);

// Loads a program with collectives. Each of `count` ranks loads the same NEFF, and a call returns when all have loaded
// it. So each rank needs its own thread: the threads make these calls at the same time, and the executions, which also
// wait for each other. vnc_count is deprecated: -1.
NRT_STATUS nrt_load_collectives(const void *   neff,
                                size_t         size,
                                int32_t        vnc,
                                int32_t        vnc_count,
                                uint32_t       ctx_device_id,
                                uint32_t       ctx_device_count,
                                nrt_model_t ** model);

// For programs with fewer ranks than devices: `g_device_count` is the largest number of ranks of any program. Without
// this call the first nrt_load_collectives builds the communicator with its own numbers.
NRT_STATUS nrt_build_global_comm(int32_t vnc, uint32_t g_device_id, uint32_t g_device_count);

// Waits for all ranks with a small all-reduce (nrt_experimental.h).
NRT_STATUS nrt_barrier(int32_t vnc, uint32_t g_device_id, uint32_t g_device_count);

NRT_STATUS nrt_execute(nrt_model_t * model, const nrt_tensor_set_t * inputs, nrt_tensor_set_t * outputs);
NRT_STATUS nrt_get_model_tensor_info(nrt_model_t * model, nrt_tensor_info_array_t ** info);
NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t * info);

// ---- tensor sets: they hold references, not tensors --------------------------------------------------------------------

NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t ** set);
void       nrt_destroy_tensor_set(nrt_tensor_set_t ** set);
NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t * set, const char * name, nrt_tensor_t * tensor);
NRT_STATUS nrt_get_tensor_from_tensor_set(nrt_tensor_set_t * set, const char * name, nrt_tensor_t ** tensor);

// ---- tensors; sizes and offsets in bytes -------------------------------------------------------------------------------

NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t placement,
                               int                    vnc,
                               size_t                 size,
                               const char *           name,
                               nrt_tensor_t **        tensor);
NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t * source,
                                     size_t               offset,
                                     size_t               size,
                                     const char *         name,
                                     nrt_tensor_t **      slice);
void       nrt_tensor_free(nrt_tensor_t ** tensor);
size_t     nrt_tensor_get_size(const nrt_tensor_t * tensor);
void *     nrt_tensor_get_va(const nrt_tensor_t * tensor);
NRT_STATUS nrt_tensor_read(const nrt_tensor_t * tensor, void * data, size_t offset, size_t size);
NRT_STATUS nrt_tensor_write(nrt_tensor_t * tensor, const void * data, size_t offset, size_t size);
NRT_STATUS nrt_tensor_memset(nrt_tensor_t * tensor, uint64_t offset, int value, size_t size);

// Copies between two tensors of the same core.
NRT_STATUS nrt_tensor_copy(const nrt_tensor_t * source,
                           size_t               source_offset,
                           nrt_tensor_t *       destination,
                           size_t               destination_offset,
                           size_t               size);

// ---- requests in flight: SDK 2.29 and later (nrt_async.h) -----------------------------------------------------------
//
// A schedule call queues a request on an execution unit of a core and returns at once. The runtime writes the request's
// status to `ret` before it reports the request as completed. `ret`, tensors, sets and models must live until then. A
// queue keeps its order. Between queues, and between a queue and calls of nrt_*, the caller waits for requests that
// share memory. In release 2.28 the functions of these names take an error tracker in place of `ret`: their symbol version
// is not NRT_3.0.0.

typedef enum {
    NRTA_XU_TENSOR_OP   = 0,  // copies and transfers; two queues
    NRTA_XU_COMPUTE     = 1,  // models; queue 0 only
    NRTA_XU_COLLECTIVES = 2,
} nrta_xu_t;

// A sequence number: 16 bits for an execution unit's queue, and 48 bits for the request in it. The latter increase.
typedef uint64_t nrta_seq_t;

#define NRTA_SEQ_NUM_MAX             ((1ull << 48) - 1)
#define NRTA_SEQ_GET_SEQ_NUM(seq_id) ((seq_id) & NRTA_SEQ_NUM_MAX)
#define NRTA_SEQ_GET_XU_ID(seq_id)   ((seq_id) >> 48)

// NRT_QUEUE_FULL: nothing was queued. NRT_EXEC_UNIT_UNRECOVERABLE: the unit never takes a request again.
NRT_STATUS nrta_execute_schedule(nrt_model_t *            model,
                                 const nrt_tensor_set_t * inputs,
                                 nrt_tensor_set_t *       outputs,
                                 int                      queue,
                                 NRT_STATUS *             ret,
                                 nrta_seq_t *             seq);
NRT_STATUS nrta_tensor_write(nrt_tensor_t * tensor,
                             const void *   data,
                             uint64_t       offset,
                             uint64_t       size,
                             int            queue,
                             NRT_STATUS *   ret,
                             nrta_seq_t *   seq);
NRT_STATUS nrta_tensor_read(void *         data,
                            nrt_tensor_t * tensor,
                            uint64_t       offset,
                            uint64_t       size,
                            int            queue,
                            NRT_STATUS *   ret,
                            nrta_seq_t *   seq);
NRT_STATUS nrta_tensor_copy(nrt_tensor_t * source,
                            uint64_t       source_offset,
                            nrt_tensor_t * destination,
                            uint64_t       destination_offset,
                            uint64_t       size,
                            int            queue,
                            NRT_STATUS *   ret,
                            nrta_seq_t *   seq);

// NRT_INVALID: unknown request. For a known request AWS documents only NRT_SUCCESS, whether it is completed or not.
NRT_STATUS nrta_is_completed(nrta_seq_t seq, bool * completed);
NRT_STATUS nrta_get_sequence(uint32_t vnc, nrta_xu_t unit, int queue, nrta_seq_t * seq);

// Signals an eventfd of the caller when the request is completed. Since SDK 2.30. The library keeps the descriptor
// until a call with -1 in its place: make that call before you close it or use it for another request. Source: the
// calls in AWS's nkipy.
NRT_STATUS nrta_event_register_seq_id_completion(nrta_seq_t seq, int event);

#ifdef __cplusplus
}
#endif

// ---- every function once -----------------------------------------------------------------------------------------------

// The backend calls these, and rejects a libnrt that lacks one.
#define NRT_FUNCTIONS_REQUIRED(X)   \
    X(nrt_init)                     \
    X(nrt_close)                    \
    X(nrt_get_status_as_str)        \
    X(nrt_get_version)              \
    X(nrt_get_visible_vnc_count)    \
    X(nrt_load)                     \
    X(nrt_unload)                   \
    X(nrt_execute)                  \
    X(nrt_get_model_tensor_info)    \
    X(nrt_free_model_tensor_info)   \
    X(nrt_allocate_tensor_set)      \
    X(nrt_destroy_tensor_set)       \
    X(nrt_add_tensor_to_tensor_set) \
    X(nrt_tensor_allocate)          \
    X(nrt_tensor_allocate_slice)    \
    X(nrt_tensor_free)              \
    X(nrt_tensor_read)              \
    X(nrt_tensor_write)

// A libnrt may lack these: the backend works without them, or never calls them.
#define NRT_FUNCTIONS_OPTIONAL(X)     \
    X(nrt_tensor_copy)                \
    X(nrt_tensor_memset)              \
    X(nrt_tensor_get_va)              \
    X(nrt_tensor_get_size)            \
    X(nrt_get_total_vnc_count)        \
    X(nrt_get_tensor_from_tensor_set) \
    X(nrt_get_vnc_memory_stats)       \
    X(nrt_get_instance_info)          \
    X(nec_get_virtual_core_size)      \
    X(nrt_load_collectives)           \
    X(nrt_build_global_comm)          \
    X(nrt_barrier)                    \
    X(nrta_execute_schedule)          \
    X(nrta_tensor_copy)               \
    X(nrta_tensor_write)              \
    X(nrta_is_completed)              \
    X(nrta_event_register_seq_id_completion)
