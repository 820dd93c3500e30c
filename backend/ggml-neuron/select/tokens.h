// Cuts a node along its tokens for kernels for other numbers of tokens. Kernels have exact numbers of tokens, and
// programs have any.
//
// Either several kernels compute a node in pieces, each with the rows of some tokens, or one kernel for more tokens
// computes it and the extra results are discarded. For attention, kernels for longer caches are also possible.
// tools/kernelgen/ggml/ops.py states the tokens' axis of each tensor beside each op; this code has no rules for single
// ops.

#pragma once

#include "ggml.h"
#include "neuron_kernels.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

constexpr int NEURON_TOKEN_SOURCES = 5;  // the most sources that rules name

// The most launches for one node: with more the CPU is faster.
constexpr int64_t NEURON_MAX_PIECES = 16;

// The limit for a node in place, such as a shift of a cache's keys: the alternative is to read and write the whole
// cache.
constexpr size_t NEURON_MAX_IN_PLACE = 1024;

// `Tokens` of tools/kernelgen/ggml/ops.py; -1: none.
struct neuron_token_rule {
    static constexpr int8_t OUTERMOST = -2;  // the result's outermost axis, and the same axis of sources

    const char * op;
    int8_t       result;
    bool         broadcast;
    int8_t       sources[NEURON_TOKEN_SOURCES];
    int8_t       more[NEURON_TOKEN_SOURCES];
    int8_t       mask;
    int8_t       written = -1;
    bool         streams = false;
};

// Returns the first rule of an op and the end of its rules, which are adjacent.
std::pair<const neuron_token_rule *, const neuron_token_rule *> neuron_token_rules(uint64_t op_hash);

// The tensors of a node or a kernel: the sources and then the result.
struct neuron_signature {
    const char *          op        = nullptr;  // ggml_op_desc; NULL for a kernel
    uint64_t              op_hash   = 0;        // nk::hash_op
    const int32_t *       op_params = nullptr;
    neuron_kernels_tensor tensors[GGML_MAX_SRC + 1];
    int                   n_src            = 0;
    int                   alias            = NEURON_KERNELS_NO_ALIAS;
    bool                  is_in_place_only = false;  // SET_ROWS and CPY have no result of their own
};

// How tensors are cut.
struct neuron_cut {
    const neuron_token_rule * rule = nullptr;
    int8_t  axis[GGML_MAX_SRC + 1];  // for each source and then the result; -1: each piece has the whole tensor
    int64_t n      = 0;              // tokens
    int64_t n_more = 0;              // elements along the axes of rule->more; 0 when it has none

    // Returns the axis along which a source may be longer than the node's, or -1.
    int more(int src) const { return src < NEURON_TOKEN_SOURCES ? rule->more[src] : -1; }

    // Returns the same for source i or, behind the sources, for the result: a written source is both.
    int more_of(const neuron_signature & node, int i) const {
        return i < node.n_src ? more(i) : rule->written >= 0 ? more(rule->written) : -1;
    }

    // Returns a tensor of a kernel for other numbers. Its strides are the node's strides, except for a mask with more
    // columns.
    neuron_kernels_tensor piece(const neuron_signature & node, int i, int64_t n_tokens, int64_t n_longer) const;
};

struct neuron_bundle;

// The numbers of tokens and of `more` for which a kernel exists, and one such kernel: others differ in strides.
struct neuron_sizes {
    int64_t               n;
    int64_t               n_more;
    const neuron_bundle * bundle;
    int32_t               number;
};

// Adds numbers to a list without duplicates, ascending in n_more and then n.
void neuron_add_sizes(std::vector<neuron_sizes> & found, const neuron_sizes & added);

// The numbers for which kernels exist, by the rest of the kernels' signatures.
class neuron_token_index {
  public:
    void add(const neuron_signature & kernel, const neuron_bundle * bundle, int32_t number);

    // Sets `cut` and returns the numbers for a node, ascending and without duplicates, or NULL when the node can't be
    // cut or nothing fits.
    const std::vector<neuron_sizes> * find(const neuron_signature & node, neuron_cut & cut) const;

    // Returns the most cells that kernels attend to, if a node is attention to more cells; else 0.
    int64_t fewer_cells(const neuron_signature & node) const;

  private:
    std::unordered_map<uint64_t, std::vector<neuron_sizes>> sizes;
};

// Returns the number of a node's streams that kernels can compute one after the other, and sets `one` to a node for one
// stream. Returns 1 when the node has one stream, or streams that depend on each other.
int64_t neuron_split_streams(const neuron_signature & node, neuron_signature & one);

// Returns in words why a node can't be cut along its tokens, so that only kernels of its exact shapes compute it; ""
// when it can.
std::string neuron_why_not_cut(const neuron_signature & node);

// Returns the bytes from a tensor's first element to its last, as ggml_nbytes does.
size_t neuron_nbytes(const neuron_kernels_tensor & t);

// Returns a tensor from its words in a key, nk::TENSOR_WORDS.
neuron_kernels_tensor neuron_tensor_of_words(const uint64_t * words);

// Returns the bytes from the tensor's first element to its last.
size_t neuron_nbytes_of_words(const uint64_t * words);

// A piece of a node: its first token, and its kernel's number of tokens.
struct neuron_range {
    int64_t first;
    int64_t n;
};

// Returns the fastest pieces for n tokens, or a single larger piece when that is faster. Returns none when no pieces
// fit, or when there would be too many.
//
// counts  numbers of tokens that kernels exist for, ascending
// costs   price of a launch for each
// again   whether rows may be computed twice, with the same result
std::vector<neuron_range> neuron_choose_pieces(int64_t                      n,
                                               const std::vector<int64_t> & counts,
                                               const std::vector<double> &  costs,
                                               bool                         again);

// Does the same with only the numbers whose kernel exists.
//
// has  whether a kernel exists. It is slow, so it is called only for numbers that would be chosen
std::vector<neuron_range> neuron_choose_pieces(int64_t                              n,
                                               std::vector<int64_t>                 counts,
                                               std::vector<double>                  costs,
                                               bool                                 again,
                                               const std::function<bool(int64_t)> & has);

// Blocks of rows. The kernel has more rows per block.
struct neuron_blocks {
    int64_t n      = 1;
    size_t  own    = 0;  // bytes per block in the group; for row numbers, rows per block
    size_t  kernel = 0;  // the same in the kernel

    bool operator==(const neuron_blocks & other) const {
        return n == other.n && own == other.own && kernel == other.kernel;
    }
};

// The content of a matrix beyond its own columns.
enum class neuron_fill : uint8_t {
    HIDE,    // -inf, as in a mask
    ZERO,    // 0: no weight in a mean
    REPEAT,  // the columns again, from the first on
};

// A matrix with a kernel's larger numbers of columns and rows.
struct neuron_wider {
    int64_t     columns = 0;
    int64_t     rows    = 0;
    neuron_fill fill    = neuron_fill::HIDE;
    int64_t     own     = 0;  // columns of the tensor; 0: its extent

    bool operator==(const neuron_wider & other) const {
        return columns == other.columns && rows == other.rows && fill == other.fill && own == other.own;
    }
};

// Returns a matrix with more columns and rows; additional rows are copies of its own. Elements are F16, F32 or I32;
// columns are contiguous.
std::vector<uint8_t> neuron_widen(const ggml_tensor * matrix, const uint8_t * data, const neuron_wider & wider);
