// Ahead-of-time compiled NeuronCore kernels: opens a bundle of kernels and finds the kernel for a ggml node.
//
// A bundle holds the NEFFs (the executables of AWS Neuron) of one manifest for one target. The library reads
// two of its forms alike: a GGUF file, the pack `<name>_<target>.kernels.gguf`; and data that is linked into the program.
//
//
//     char             message[NEURON_KERNELS_MESSAGE_SIZE];
//     neuron_kernels * bundle;
//     if (neuron_kernels_open_file("llama3_trn1.kernels.gguf", &bundle, message, sizeof(message))) {
//         fprintf(stderr, "%s\n", message);
//         return 1;
//     }
//     int32_t kernel = neuron_kernels_find(bundle, "mul_mat", op_params, inputs, 2, &output, NEURON_KERNELS_NO_ALIAS);
//     if (kernel != NEURON_KERNELS_NOT_FOUND) {
//         size_t       size;
//         const void * neff = neuron_kernels_neff(bundle, kernel, &size);
//     }
//     neuron_kernels_close(bundle);
//
// The library depends on neither ggml nor libnrt. It has no global state and throws no exception.
//
// Threads: an open bundle never changes. Any number of threads may call any function on it at once, except
// neuron_kernels_close.
//
// Lifetime: every pointer that a function returns belongs to the bundle and is valid until the bundle is closed.
//
// ABI: the bundle is opaque and a number names a kernel, so the library can add properties of either without changing a
// struct. The layout of neuron_kernels_tensor is fixed. neuron_kernels_table, which generated code fills in, starts
// with its own size and grows at the end.

#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(NEURON_KERNELS_SHARED)
#    define NEURON_KERNELS_API __attribute__((visibility("default")))
#else
#    define NEURON_KERNELS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Version of the functions below and of the table. Both only get additions, and each addition raises the version by
// one.
#define NEURON_KERNELS_API_VERSION 9

// The version of packs and tables that this library reads: of their keys, hash and metadata
// (docs/reference/bundle-format.md).
#define NEURON_KERNELS_FORMAT 3

// Figures of the NeuronCore memory that a kernel's program takes, in bytes: its instructions, the rings of its DMA, and
// its share of the scratchpad, which all programs of a core use. Since API version 9.
#define NEURON_KERNELS_MEMORY_CODE       0
#define NEURON_KERNELS_MEMORY_RINGS      1
#define NEURON_KERNELS_MEMORY_SCRATCHPAD 2
#define NEURON_KERNELS_N_MEMORY          3
#define NEURON_KERNELS_MAX_MEMORY        (UINT64_C(1) << 40)

// Size of a buffer that holds any message; a shorter buffer receives the beginning of the message.
#define NEURON_KERNELS_MESSAGE_SIZE 512

#define NEURON_KERNELS_MAX_INPUTS  16    // ggml's GGML_MAX_SRC is 10
#define NEURON_KERNELS_N_OP_PARAMS 16    // 32-bit words in ggml's op_params
#define NEURON_KERNELS_ABSENT      (-1)  // type of an absent input
#define NEURON_KERNELS_NO_ALIAS    (-1)  // the result has its own memory
#define NEURON_KERNELS_NOT_FOUND   (-1)  // no such kernel

// For a weight that is not in ggml's layout, the type of its neuron_kernels_tensor holds the layout: the type's number
// in the low bits and the layout from bit 16 on. docs/reference/bundle-keys.md describes the layouts. Since API version
// 7.
#define NEURON_KERNELS_FORM_SHIFT           16
#define NEURON_KERNELS_FORM_PLANES          1
#define NEURON_KERNELS_FORM_TRANSPOSED      2
#define NEURON_KERNELS_FORM_BF16            3
#define NEURON_KERNELS_FORM_F8_E4M3_128X128 4
#define NEURON_KERNELS_LAST_FORM            NEURON_KERNELS_FORM_F8_E4M3_128X128

// An open bundle.
typedef struct neuron_kernels neuron_kernels;

// Status of a call. The values are part of the ABI.
typedef enum neuron_kernels_status {
    NEURON_KERNELS_OK               = 0,
    NEURON_KERNELS_ERROR_ARGUMENT   = 1,  // a null pointer where none is allowed
    NEURON_KERNELS_ERROR_IO         = 2,  // a file can't be opened, is not a regular file, or can't be mapped
    NEURON_KERNELS_ERROR_NOT_A_PACK = 3,  // the bytes are not GGUF, or GGUF that holds something else (a model)
    NEURON_KERNELS_ERROR_VERSION    = 4,  // an unsupported version of GGUF, of the pack or the table
    NEURON_KERNELS_ERROR_CORRUPT    = 5,  // truncated, or its parts contradict each other
    NEURON_KERNELS_ERROR_MEMORY     = 6,  // out of memory
} neuron_kernels_status;

// A tensor as ggml describes it; copy type, ne and nb of a `struct ggml_tensor` unchanged.
typedef struct neuron_kernels_tensor {
    int32_t  type;   // enum ggml_type, with a layout if it has one, or NEURON_KERNELS_ABSENT
    int64_t  ne[4];  // elements per dimension, dimension 0 fastest
    uint64_t nb[4];  // strides in bytes; nb[0] is the size of one element or, for a quantized type, of one block
} neuron_kernels_tensor;

// A bundle as plain arrays. kernelgen generates one as a constant for a program that links a bundle, and the library
// makes one when it opens a pack. Do not write one by hand; docs/reference/bundle-format.md describes the
// contents.
typedef struct neuron_kernels_table {
    uint32_t         struct_size;  // sizeof(neuron_kernels_table)
    uint32_t         format;       // NEURON_KERNELS_FORMAT
    uint32_t         simulated;    // 1 when the NEFFs are the simulator's
    uint32_t         lnc;          // physical cores per logical NeuronCore that the NEFFs were compiled for
    uint32_t         n_kernels;
    uint32_t         n_neffs;
    uint32_t         n_slots;  // a power of two, at least 8 and at least 2 * n_kernels
    const char *     name;
    const char *     target;
    const char *     compiler;
    const char *     flags;  // each followed by a newline
    const char *     version;
    const char *     jax_version;
    const char *     ids;           // n_kernels strings, ascending, one after another
    const uint32_t * id_offsets;    // [n_kernels]
    const char *     hlo_sha256;    // [n_kernels][65]
    const uint32_t * kernel_neff;   // [n_kernels], below n_neffs
    const uint64_t * key_words;     // every kernel's key, one after another
    const uint32_t * key_offsets;   // [n_kernels + 1]
    const uint32_t * slots;         // [n_slots], kernel + 1, or 0 where empty
    const uint8_t *  neff_data;
    const uint64_t * neff_offsets;  // [n_neffs], from neff_data
    const uint64_t * neff_sizes;    // [n_neffs], bytes
    const char *     neff_sha256;   // [n_neffs][65]
    const uint64_t * neff_memory;   // [n_neffs][NEURON_KERNELS_N_MEMORY], bytes, or NULL
} neuron_kernels_table;

//
// open and close
//

// Opens a pack.
//
// The file is mapped read-only: processes that open the same pack share its memory, and NEFFs are read from disk at
// their first use. This function copies the index and checks all of it, in time proportional to its size; finding and
// listing kernels later never touches the file. NEFF bytes stay in the file: if another program overwrites or shortens
// the pack in place while it is open, the bytes behind neuron_kernels_neff change, or reading them ends the program
// with SIGBUS. neuron_kernels_read returns an error instead. To replace a pack, rename another file over it, as
// kernelgen does: readers then keep the file that they opened.
//
// On success *bundle is the bundle. On error it is NULL, and `message`, unless it is NULL, receives the file, the
// mistake, its place (byte offset or metadata key) and the expected value.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_open_file(const char *      path,
                                                                  neuron_kernels ** bundle,
                                                                  char *            message,
                                                                  size_t            message_size);

// Opens a pack that is in memory. `data` is not copied: it must stay unchanged until the bundle is closed. It needs no
// alignment.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_open_memory(const void *      data,
                                                                    size_t            size,
                                                                    neuron_kernels ** bundle,
                                                                    char *            message,
                                                                    size_t            message_size);

// Opens an embedded bundle in constant time. Nothing is copied. The table is part of the program, so only its versions
// are checked. neuron_kernels_verify checks its NEFFs, as in the other forms.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_open_embedded(const neuron_kernels_table * table,
                                                                      neuron_kernels **            bundle,
                                                                      char *                       message,
                                                                      size_t                       message_size);

// Frees a bundle; NULL is allowed.
NEURON_KERNELS_API void neuron_kernels_close(neuron_kernels * bundle);

// Returns the value of NEURON_KERNELS_API_VERSION at the time the library was compiled.
NEURON_KERNELS_API uint32_t neuron_kernels_api_version(void);

// Returns a name for a status, such as "corrupt". Never NULL.
NEURON_KERNELS_API const char * neuron_kernels_status_name(neuron_kernels_status status);

//
// find
//

// Returns the kernel that computes a ggml node, or NEURON_KERNELS_NOT_FOUND. Takes constant time and allocates nothing.
//
// A kernel fits when everything is equal: op, op_params, types, shapes, strides and aliasing. Strides of dimensions
// with one element are ignored, because they mean nothing.
//
//   op         the name from ggml_op_desc ("MUL_MAT", "RELU", "SWIGLU"), in upper or lower case
//   op_params  ggml's 16 words, or NULL when all are 0; for an op that ggml does not have, the 64 bytes that
//              docs/reference/bundle-format.md describes
//   inputs     ggml's src[0], src[1], ...; an absent input has the type NEURON_KERNELS_ABSENT, and absent inputs at the
//              end may be left out
//   output     the node itself
//   alias      the number of the input whose memory receives the result, or NEURON_KERNELS_NO_ALIAS: 2 for SET_ROWS, 1
//              for CPY, and 0 for an op made by a ggml_..._inplace function
NEURON_KERNELS_API int32_t neuron_kernels_find(const neuron_kernels *        bundle,
                                               const char *                  op,
                                               const int32_t *               op_params,
                                               const neuron_kernels_tensor * inputs,
                                               size_t                        n_inputs,
                                               const neuron_kernels_tensor * output,
                                               int32_t                       alias);

// Returns the kernel with this key, or NEURON_KERNELS_NOT_FOUND. Takes time proportional to the key and allocates
// nothing.
//
// Use it to find a graph kernel, which computes several nodes of a graph at once: docs/reference/bundle-keys.md defines
// the words of its key. It also finds any other kernel by its key. Since API version 5.
NEURON_KERNELS_API int32_t neuron_kernels_find_words(const neuron_kernels * bundle,
                                                     const uint64_t *       words,
                                                     size_t                 n_words);

// Returns the kernel of this name, or NEURON_KERNELS_NOT_FOUND. Only kernels that a manifest lists by their source (a
// function of a file), and not by an op, have names (docs/guides/source-kernels.md). `name` equals the name in the
// manifest exactly. Takes constant time and allocates nothing. Since API version 6.
NEURON_KERNELS_API int32_t neuron_kernels_find_name(const neuron_kernels * bundle, const char * name);

// Returns the kernel with this id (`mul_mat-4096x512-f32-3f9ac2d1b7e0`), or NEURON_KERNELS_NOT_FOUND. Binary search.
NEURON_KERNELS_API int32_t neuron_kernels_find_id(const neuron_kernels * bundle, const char * id);

// Fills in the strides of a tensor without gaps: sets `tensor->nb` from `tensor->type` and `tensor->ne`. Returns 0, or
// -1 when the type is unknown or the shape is invalid: then the tensor is unchanged.
NEURON_KERNELS_API int neuron_kernels_set_dense(neuron_kernels_tensor * tensor);

//
// contents of a bundle; kernels are numbered from 0, in ascending order of their ids
//

NEURON_KERNELS_API size_t neuron_kernels_count(const neuron_kernels * bundle);

// Returns a kernel's id, or NULL when the bundle has no kernel of this number.
NEURON_KERNELS_API const char * neuron_kernels_id(const neuron_kernels * bundle, int32_t kernel);

// Returns a kernel's NEFF and sets *size (which may be NULL) to its length in bytes. Returns NULL and sets 0 when the
// bundle has no kernel of this number.
NEURON_KERNELS_API const void * neuron_kernels_neff(const neuron_kernels * bundle, int32_t kernel, size_t * size);

// Copies a kernel's NEFF to `data`, which has room for `size` bytes, and compares the copy's SHA-256 with the bundle's
// index. `size` must equal the NEFF's size. Call this each time before you load a NEFF: the copy is right even if a
// pack's file changes afterwards. It takes some milliseconds per MB the first time, and again after the file changed;
// else it only copies.
//
// Returns the same as neuron_kernels_verify, NEURON_KERNELS_ERROR_ARGUMENT when `size` differs, and
// NEURON_KERNELS_ERROR_IO when the file can't be read. On error `data` holds no NEFF. Since API version 8.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_read(const neuron_kernels * bundle,
                                                             int32_t                kernel,
                                                             void *                 data,
                                                             size_t                 size,
                                                             char *                 message,
                                                             size_t                 message_size);

// Compares a kernel's NEFF with its SHA-256 in the bundle's index; opening a bundle does not do that. This function
// reads the NEFF's bytes, which takes some milliseconds per MB. A pack's file may change afterwards:
// neuron_kernels_read guards against that.
//
// Returns NEURON_KERNELS_OK, NEURON_KERNELS_ERROR_CORRUPT when the digests differ, or NEURON_KERNELS_ERROR_ARGUMENT
// when the bundle has no kernel of this number. `message`, unless it is NULL, receives the mistake, or an empty text on
// success. An embedded bundle without digests (all of them before API version 4) is trusted, as the program is. Since
// API version 3.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_verify(const neuron_kernels * bundle,
                                                               int32_t                kernel,
                                                               char *                 message,
                                                               size_t                 message_size);

// Returns the number of the kernel's NEFF, below neuron_kernels_neff_count, or NEURON_KERNELS_NOT_FOUND when the bundle
// has no kernel of this number. Equal NEFFs are stored once, so kernels may share one: load each number once.
NEURON_KERNELS_API int32_t neuron_kernels_neff_index(const neuron_kernels * bundle, int32_t kernel);

NEURON_KERNELS_API size_t neuron_kernels_neff_count(const neuron_kernels * bundle);

// Returns the NeuronCore memory that a kernel's program takes once it is loaded, as NEURON_KERNELS_N_MEMORY figures,
// each at most NEURON_KERNELS_MAX_MEMORY. Returns NULL when the bundle has no kernel of this number, or no figures.
NEURON_KERNELS_API const uint64_t * neuron_kernels_neff_memory(const neuron_kernels * bundle, int32_t kernel);

// Returns a kernel's lookup key, which docs/reference/bundle-keys.md describes, and sets *n_words (which may be NULL)
// to its length. Returns NULL and sets 0 when the bundle has no kernel of this number.
NEURON_KERNELS_API const uint64_t * neuron_kernels_key(const neuron_kernels * bundle, int32_t kernel, size_t * n_words);

// Returns the SHA-256 of the HLO that a kernel was compiled from, as 64 hex digits, or NULL when the bundle has no
// kernel of this number.
NEURON_KERNELS_API const char * neuron_kernels_hlo_sha256(const neuron_kernels * bundle, int32_t kernel);

// Returns 1 when the simulator made the NEFFs, else 0. The simulator's NEFFs never run on a device, and a device's
// NEFFs never run in the simulator.
NEURON_KERNELS_API int neuron_kernels_simulated(const neuron_kernels * bundle);

// Returns the number of physical cores per logical NeuronCore that the NEFFs require (NEURON_LOGICAL_NC_CONFIG).
NEURON_KERNELS_API uint32_t neuron_kernels_lnc(const neuron_kernels * bundle);

// Returns a text that describes the bundle, or NULL for an unknown name:
//   "name"         the manifest's name
//   "target"       the target that the kernels run on ("trn1")
//   "compiler"     the compiler that made the NEFFs, with its version
//   "flags"        the compiler's arguments, each followed by a newline
//   "version"      kernelgen's version
//   "jax_version"  the version of JAX that emitted the HLO
NEURON_KERNELS_API const char * neuron_kernels_metadata(const neuron_kernels * bundle, const char * name);

#ifdef __cplusplus
}
#endif
