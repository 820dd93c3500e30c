// Ahead-of-time compiled NeuronCore kernels: open a bundle of them and find the one for a ggml node.
//
// A bundle holds the NEFFs (the executables of AWS Neuron) of one manifest for one target. It is a file, the GGUF pack
// `<name>_<target>.kernels.gguf`; a folder, the tree `<name>_<target>`; or it is linked into the program. All are used alike:
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
// The library depends on neither ggml nor libnrt. It keeps no global state, and no exception leaves it.
//
// Threads: an open bundle never changes. Any number of threads may at once call anything on it but
// neuron_kernels_close.
//
// Lifetime: every pointer that a function returns belongs to the bundle and is good until it is closed.
//
// ABI: the bundle is opaque and a kernel is named by its number, so what is known about either can grow without
// changing a struct. The layout of neuron_kernels_tensor is fixed; neuron_kernels_table, which generated code fills in,
// starts with its own size and grows at the end.

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

// Version of the functions below and of the table. Either is added to, never changed; each addition raises it by one.
#define NEURON_KERNELS_API_VERSION 9

// Versions of what is in a pack, a tree and a table that this library reads, the first and the last: keys, hash and metadata
// (docs/reference/bundle-format.md). The second has graph kernels, too, the third kernels that are found by their names.
#define NEURON_KERNELS_FIRST_FORMAT 1
#define NEURON_KERNELS_FORMAT       3

// Figures of the memory of a NeuronCore that a kernel's program takes, in bytes: its instructions, the rings of its copies, and what it
// needs of the scratchpad, which the programs of a core share. Since API version 9.
#define NEURON_KERNELS_MEMORY_CODE       0
#define NEURON_KERNELS_MEMORY_RINGS      1
#define NEURON_KERNELS_MEMORY_SCRATCHPAD 2
#define NEURON_KERNELS_N_MEMORY          3
#define NEURON_KERNELS_MAX_MEMORY        (UINT64_C(1) << 40)

// Room for any message; a shorter buffer gets the message's beginning.
#define NEURON_KERNELS_MESSAGE_SIZE 512

#define NEURON_KERNELS_MAX_INPUTS  16    // ggml's GGML_MAX_SRC is 10
#define NEURON_KERNELS_N_OP_PARAMS 16    // 32-bit words in ggml's op_params
#define NEURON_KERNELS_ABSENT      (-1)  // type of an input that is not there
#define NEURON_KERNELS_NO_ALIAS    (-1)  // the result has memory of its own
#define NEURON_KERNELS_NOT_FOUND   (-1)  // no such kernel

// A weight that is not stored as ggml has it has its layout in the type of its neuron_kernels_tensor: the type's number with the
// layout from bit 16 on. docs/reference/bundle-keys.md says what the layouts are. Since API version 7.
#define NEURON_KERNELS_FORM_SHIFT           16
#define NEURON_KERNELS_FORM_PLANES          1
#define NEURON_KERNELS_FORM_TRANSPOSED      2
#define NEURON_KERNELS_FORM_BF16            3
#define NEURON_KERNELS_FORM_F8_E4M3_128X128 4
#define NEURON_KERNELS_LAST_FORM            NEURON_KERNELS_FORM_F8_E4M3_128X128

// One bundle, opened.
typedef struct neuron_kernels neuron_kernels;

// Values are part of the ABI.
typedef enum neuron_kernels_status {
    NEURON_KERNELS_OK               = 0,
    NEURON_KERNELS_ERROR_ARGUMENT   = 1,  // a null pointer where none may be
    NEURON_KERNELS_ERROR_IO         = 2,  // a file can't be opened, is not a regular file, or can't be mapped
    NEURON_KERNELS_ERROR_NOT_A_PACK = 3,  // the bytes are not GGUF, or GGUF that holds something else (a model)
    NEURON_KERNELS_ERROR_VERSION    = 4,  // a version of GGUF, of the pack, the tree or the table that is not read here
    NEURON_KERNELS_ERROR_CORRUPT    = 5,  // truncated, or its parts contradict each other
    NEURON_KERNELS_ERROR_MEMORY     = 6,  // out of memory
} neuron_kernels_status;

// A tensor as ggml describes it; type, ne and nb of a `struct ggml_tensor` can be copied as they are.
typedef struct neuron_kernels_tensor {
    int32_t  type;   // enum ggml_type, with a layout where it has one, or NEURON_KERNELS_ABSENT
    int64_t  ne[4];  // elements per dimension, dimension 0 fastest
    uint64_t nb[4];  // strides in bytes; nb[0] is that of one element or, for a quantized type, of one block
} neuron_kernels_tensor;

// A bundle as plain arrays: what a program that links one has as a constant, generated by kernelgen, and what a pack is
// turned into when it is opened. Not meant to be written by hand; docs/reference/bundle-format.md describes the contents.
typedef struct neuron_kernels_table {
    uint32_t         struct_size;  // sizeof(neuron_kernels_table)
    uint32_t         format;       // from NEURON_KERNELS_FIRST_FORMAT to NEURON_KERNELS_FORMAT
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
    // Not in tables that are shorter.
    const char *     neff_sha256;  // [n_neffs][65], or NULL
    const uint64_t * neff_memory;  // [n_neffs][NEURON_KERNELS_N_MEMORY], bytes, or NULL
} neuron_kernels_table;

//
// open and close
//

// Opens a pack.
//
// The file is mapped, read-only: processes that open the same pack share its memory, and NEFFs are read from disk when
// they are used. The index is copied and fully checked here, in time proportional to its size; after that finding and
// enumerating kernels never touch the file. NEFF bytes do: of a pack that is overwritten or shortened in place while it is
// open, what neuron_kernels_neff points to changes, or kills the program that reads it with SIGBUS. neuron_kernels_read tells instead.
// Replace a pack by renaming another one over it, as kernelgen does: then its readers keep what they opened.
//
// On success *bundle is the bundle. On error it is NULL and `message`, unless it is NULL, says which file, what is
// wrong with it, where (byte offset or metadata key) and what was expected.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_open_file(const char *      path,
                                                                  neuron_kernels ** bundle,
                                                                  char *            message,
                                                                  size_t            message_size);

// Opens a pack that is in memory. `data` is not copied and must stay as it is until the bundle is closed; it needs no
// alignment.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_open_memory(const void *      data,
                                                                    size_t            size,
                                                                    neuron_kernels ** bundle,
                                                                    char *            message,
                                                                    size_t            message_size);

// Opens a tree: the folder that holds its index.json.
//
// The index is checked as that of a pack is, and the NEFFs, which are files of their own, are read into memory. Later
// changes to the tree make no difference to the bundle. A tree is for people to look into: a pack opens faster, takes no
// memory for NEFFs, and shares them with other processes.
//
// On error the message says which file and where (byte offset in index.json). Since API version 2.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_open_tree(const char *      path,
                                                                  neuron_kernels ** bundle,
                                                                  char *            message,
                                                                  size_t            message_size);

// Opens an embedded bundle in constant time: nothing is copied, and the table, being part of the program, is trusted
// once its versions are right. What it says of its NEFFs is for neuron_kernels_verify to check, as of the other forms.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_open_embedded(const neuron_kernels_table * table,
                                                                      neuron_kernels **            bundle,
                                                                      char *                       message,
                                                                      size_t                       message_size);

// Frees a bundle; NULL is allowed.
NEURON_KERNELS_API void neuron_kernels_close(neuron_kernels * bundle);

// Returns NEURON_KERNELS_API_VERSION as it was when the library was compiled.
NEURON_KERNELS_API uint32_t neuron_kernels_api_version(void);

// Returns a name for a status, such as "corrupt". Never NULL.
NEURON_KERNELS_API const char * neuron_kernels_status_name(neuron_kernels_status status);

//
// find
//

// Returns the kernel that computes a ggml node, or NEURON_KERNELS_NOT_FOUND. Takes constant time and allocates nothing.
//
// A kernel fits when everything is equal: op, op_params, types, shapes, strides and aliasing. Strides that mean nothing
// are ignored: those of dimensions with one element.
//
//   op         what ggml_op_desc returns ("MUL_MAT", "RELU", "SWIGLU"), in any case
//   op_params  ggml's 16 words, or NULL when all are 0; for an op that ggml does not have, the 64 bytes that
//              docs/reference/bundle-format.md describes
//   inputs     ggml's src[0], src[1], ...; absent ones have the type NEURON_KERNELS_ABSENT, and those at the end may
//              be left out
//   output     the node itself
//   alias      which input's memory the result is written to, or NEURON_KERNELS_NO_ALIAS. SET_ROWS has 2, CPY has 1,
//              and an op made by a ggml_..._inplace function has 0
NEURON_KERNELS_API int32_t neuron_kernels_find(const neuron_kernels *        bundle,
                                               const char *                  op,
                                               const int32_t *               op_params,
                                               const neuron_kernels_tensor * inputs,
                                               size_t                        n_inputs,
                                               const neuron_kernels_tensor * output,
                                               int32_t                       alias);

// Returns the kernel with this key, or NEURON_KERNELS_NOT_FOUND. Takes time proportional to the key and allocates nothing.
//
// It is how a graph kernel is found, which computes several nodes of a graph at once: docs/reference/bundle-keys.md says which words
// stand for them. Any kernel's key can be asked for. Since API version 5.
NEURON_KERNELS_API int32_t neuron_kernels_find_words(const neuron_kernels * bundle,
                                                     const uint64_t *       words,
                                                     size_t                 n_words);

// Returns the kernel of this name, or NEURON_KERNELS_NOT_FOUND: one that a manifest names by its source, a function of a file,
// and not by an op (docs/guides/source-kernels.md). `name` is the manifest's name of it, exactly. Takes constant time and allocates
// nothing. Since API version 6.
NEURON_KERNELS_API int32_t neuron_kernels_find_name(const neuron_kernels * bundle, const char * name);

// Returns the kernel with this id (`mul_mat-4096x512-f32-3f9ac2d1b7e0`), or NEURON_KERNELS_NOT_FOUND. Binary search.
NEURON_KERNELS_API int32_t neuron_kernels_find_id(const neuron_kernels * bundle, const char * id);

// Fills in the strides of a tensor without gaps: `tensor->nb` from `tensor->type` and `tensor->ne`.
// Returns 0, or -1 when the type is unknown or the shape is not one: then the tensor is left as it was.
NEURON_KERNELS_API int neuron_kernels_set_dense(neuron_kernels_tensor * tensor);

//
// what a bundle holds; kernels are numbered from 0, in ascending order of their ids
//

NEURON_KERNELS_API size_t neuron_kernels_count(const neuron_kernels * bundle);

// Returns a kernel's id, or NULL where the bundle has fewer kernels.
NEURON_KERNELS_API const char * neuron_kernels_id(const neuron_kernels * bundle, int32_t kernel);

// Returns a kernel's NEFF and sets *size (which may be NULL) to its length in bytes; NULL and 0 where the bundle
// has fewer kernels.
NEURON_KERNELS_API const void * neuron_kernels_neff(const neuron_kernels * bundle, int32_t kernel, size_t * size);

// Copies a kernel's NEFF to `data`, which has room for `size` bytes: the NEFF's size. The copy has the SHA-256 that the bundle's
// index has for it, whatever becomes of a pack's file: call it each time before a NEFF is loaded. It takes some milliseconds for
// each MB.
//
// Returns as neuron_kernels_verify does, and NEURON_KERNELS_ERROR_ARGUMENT where `size` differs, and
// NEURON_KERNELS_ERROR_IO when the file can't be read. Then there is no NEFF in `data`. Since API version 8.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_read(const neuron_kernels * bundle,
                                                             int32_t                kernel,
                                                             void *                 data,
                                                             size_t                 size,
                                                             char *                 message,
                                                             size_t                 message_size);

// Compares a kernel's NEFF with the SHA-256 that the bundle's index has for it, which opening a bundle does not do. It reads the
// NEFF's bytes, some milliseconds for each MB; a pack's file may change afterwards, which neuron_kernels_read takes care of.
//
// Returns NEURON_KERNELS_OK, NEURON_KERNELS_ERROR_CORRUPT when they differ, or NEURON_KERNELS_ERROR_ARGUMENT where the bundle
// has fewer kernels; `message`, unless it is NULL, says what is wrong, and is empty when nothing is. A bundle that was embedded
// without digests, as all were before API version 4, is trusted as the program is. Since API version 3.
NEURON_KERNELS_API neuron_kernels_status neuron_kernels_verify(const neuron_kernels * bundle,
                                                               int32_t                kernel,
                                                               char *                 message,
                                                               size_t                 message_size);

// Equal NEFFs are stored once, so kernels may share one. Returns the number of the kernel's NEFF, which is below
// neuron_kernels_neff_count: load each number once. NEURON_KERNELS_NOT_FOUND where the bundle has fewer kernels.
NEURON_KERNELS_API int32_t neuron_kernels_neff_index(const neuron_kernels * bundle, int32_t kernel);

NEURON_KERNELS_API size_t neuron_kernels_neff_count(const neuron_kernels * bundle);

// Returns what a kernel's program takes of the memory of a NeuronCore, NEURON_KERNELS_N_MEMORY figures, before it is loaded; NULL where
// the bundle has fewer kernels, and where it does not say, as those that earlier kernelgens wrote. Each is at most
// NEURON_KERNELS_MAX_MEMORY. Since API version 9.
NEURON_KERNELS_API const uint64_t * neuron_kernels_neff_memory(const neuron_kernels * bundle, int32_t kernel);

// Returns a kernel's lookup key, as docs/reference/bundle-keys.md describes it, and sets *n_words (which may be NULL) to its
// length; NULL and 0 where the bundle has fewer kernels.
NEURON_KERNELS_API const uint64_t * neuron_kernels_key(const neuron_kernels * bundle, int32_t kernel, size_t * n_words);

// Returns the SHA-256 of the HLO that a kernel was compiled from as 64 hex digits, or NULL where the bundle has
// fewer kernels.
NEURON_KERNELS_API const char * neuron_kernels_hlo_sha256(const neuron_kernels * bundle, int32_t kernel);

// Returns whether the NEFFs were made by the simulator. Such NEFFs never run on a device, and a device's never in the
// simulator.
NEURON_KERNELS_API int neuron_kernels_simulated(const neuron_kernels * bundle);

// Returns how many physical cores a logical NeuronCore has, as the NEFFs expect it (NEURON_LOGICAL_NC_CONFIG).
NEURON_KERNELS_API uint32_t neuron_kernels_lnc(const neuron_kernels * bundle);

// Returns a text that describes the bundle, or NULL when there is none of that name:
//   "name"         the manifest's name
//   "target"       what the kernels run on ("trn1")
//   "compiler"     which compiler made the NEFFs, with its version
//   "flags"        the compiler's arguments, each followed by a newline
//   "version"      kernelgen's version
//   "jax_version"  the version of JAX that emitted the HLO
NEURON_KERNELS_API const char * neuron_kernels_metadata(const neuron_kernels * bundle, const char * name);

#ifdef __cplusplus
}
#endif
