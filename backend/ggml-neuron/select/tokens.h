// Kernels have exact numbers of tokens, programs any: how a node is cut along its tokens and computed by kernels for other
// numbers of them.
//
// A node is computed by pieces one after the other, each with the rows of some of its tokens, or by one kernel for more tokens
// than it has, whose results for the others are thrown away. Attention also finds kernels for longer caches. Which axis of
// which tensor is the tokens' stands beside each op in tools/kernelgen/ggml/ops.py; nothing here knows an op.

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

constexpr int NEURON_TOKEN_SOURCES = 5;  // as many as rules name

// More launches than this for one node are not better than the CPU.
constexpr int64_t NEURON_MAX_PIECES = 16;

// The same of a node in place, as of a shift of a cache's keys, whose other way is to read the whole cache and to write it again.
constexpr size_t NEURON_MAX_IN_PLACE = 1024;

// `Tokens` of tools/kernelgen/ggml/ops.py; -1 stands for none.
struct neuron_token_rule {
    static constexpr int8_t OUTERMOST = -2;  // the result's outermost axis, and the same of sources

    const char * op;
    int8_t       result;
    bool         broadcast;
    int8_t       sources[NEURON_TOKEN_SOURCES];
    int8_t       more[NEURON_TOKEN_SOURCES];
    int8_t       mask;
    int8_t       written = -1;
    bool         streams = false;
};

// Returns the first rule of an op and the one behind its last: they stand side by side.
std::pair<const neuron_token_rule *, const neuron_token_rule *> neuron_token_rules(uint64_t op_hash);

// A node's or a kernel's tensors: the sources and then the result.
struct neuron_signature {
    const char *          op        = nullptr;  // ggml_op_desc; NULL of a kernel
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
    int8_t                    axis[GGML_MAX_SRC + 1];  // of each source and then the result; -1: whole in each piece
    int64_t                   n      = 0;              // tokens
    int64_t                   n_more = 0;              // elements along the axes of rule->more; 0 when it has none

    // Returns the axis along which a source may be longer than the node's, or -1.
    int more(int src) const { return src < NEURON_TOKEN_SOURCES ? rule->more[src] : -1; }

    // Returns the same of a source or, behind these, of the result: what is written is both.
    int more_of(const neuron_signature & node, int i) const {
        return i < node.n_src ? more(i) : rule->written >= 0 ? more(rule->written) : -1;
    }

    // Returns a tensor as a kernel for other numbers has it. Its strides are the node's, except for a mask that is made longer.
    neuron_kernels_tensor piece(const neuron_signature & node, int i, int64_t n_tokens, int64_t n_longer) const;
};

struct neuron_bundle;

// Numbers that there is a kernel for, and one of them: others have the same numbers and other strides.
struct neuron_sizes {
    int64_t               n;
    int64_t               n_more;
    const neuron_bundle * bundle;
    int32_t               number;
};

// Adds numbers to those that are ascending in n_more and then n, and each once.
void neuron_add_sizes(std::vector<neuron_sizes> & found, const neuron_sizes & added);

// Which numbers there are kernels for, by what is left of kernels without these numbers.
class neuron_token_index {
  public:
    void add(const neuron_signature & kernel, const neuron_bundle * bundle, int32_t number);

    // Returns the numbers for a node, ascending and each once, or NULL when the node can't be cut or nothing fits, and sets `cut`.
    const std::vector<neuron_sizes> * find(const neuron_signature & node, neuron_cut & cut) const;

  private:
    std::unordered_map<uint64_t, std::vector<neuron_sizes>> sizes;
};

// Returns how many streams a node has that are computed one after the other, each as a node, and sets `one` to such a node; 1 where it has one,
// or where they are not independent.
int64_t neuron_split_streams(const neuron_signature & node, neuron_signature & one);

// Returns in words why a node can't be cut along its tokens, so that only kernels of its own shapes compute it; "" when it can.
std::string neuron_why_not_cut(const neuron_signature & node);

// Returns the bytes from a tensor's first element to its last, as ggml_nbytes does.
size_t neuron_nbytes(const neuron_kernels_tensor & t);

// Returns a tensor by its words in a key, nk::TENSOR_WORDS.
neuron_kernels_tensor neuron_tensor_of_words(const uint64_t * words);

// Returns the bytes from its first element to its last.
size_t neuron_nbytes_of_words(const uint64_t * words);

// A piece of a node: its first token, and for how many its kernel is.
struct neuron_range {
    int64_t first;
    int64_t n;
};

// Returns pieces that together are n tokens, those that take least time; one whose n is larger than the node's when that is
// better. Returns none when no pieces fit, or when there would be too many.
//
// counts  for what numbers there are kernels, ascending
// costs   what a launch for each takes
// again   whether rows may be computed twice, with the same result
std::vector<neuron_range> neuron_choose_pieces(int64_t                      n,
                                               const std::vector<int64_t> & counts,
                                               const std::vector<double> &  costs,
                                               bool                         again);

// Returns the same of those numbers alone for which there is a kernel.
//
// has  whether there is one; it takes longer than all else, so it is asked only for numbers that would be chosen
std::vector<neuron_range> neuron_choose_pieces(int64_t                              n,
                                               std::vector<int64_t>                 counts,
                                               std::vector<double>                  costs,
                                               bool                                 again,
                                               const std::function<bool(int64_t)> & has);

// Rows in blocks of which a kernel has more rows each.
struct neuron_blocks {
    int64_t n      = 1;
    size_t  own    = 0;  // bytes of a block of the group's, or of numbers: rows
    size_t  kernel = 0;  // the same of the kernel's

    bool operator==(const neuron_blocks & other) const {
        return n == other.n && own == other.own && kernel == other.kernel;
    }
};

// What is beyond the columns of a matrix that kernels have more of.
enum class neuron_fill : uint8_t {
    HIDE,    // -inf: what a mask hides
    ZERO,    // what has no weight in a mean
    REPEAT,  // the columns again, from the first on
};

// A matrix as kernels have it, of more columns and rows.
struct neuron_wider {
    int64_t     columns = 0;
    int64_t     rows    = 0;
    neuron_fill fill    = neuron_fill::HIDE;
    int64_t     own     = 0;  // columns of the tensor; 0: as many as it says

    bool operator==(const neuron_wider & other) const {
        return columns == other.columns && rows == other.rows && fill == other.fill && own == other.own;
    }
};

// Returns a matrix with more columns, and with rows that it does not have copied from those that it has. Elements are F16, F32 or I32,
// columns are without gaps.
std::vector<uint8_t> neuron_widen(const ggml_tensor * matrix, const uint8_t * data, const neuron_wider & wider);
