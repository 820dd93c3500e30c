// How a graph is computed: for each node its kernel, bound to memory, and the copies around it.
//
// A plan is made in three steps: each node's kernel is found, its operands are placed, and all kernels are bound. It is
// kept and used again when the same graph is computed again.

#pragma once

#include "device/core.h"
#include "ggml-impl.h"
#include "plan/fusion.h"
#include "select/causality.h"
#include "select/groups.h"
#include "select/kernel_store.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

// What happens around a kernel's execution, because an operand is not where the kernel needs it.

// A copy between host memory and the core, of core.size bytes.
struct neuron_transfer {
    ggml_tensor *  tensor;  // in host memory; it may be given other memory before the graph is computed again
    size_t         offset;  // in the tensor
    neuron_operand core;

    char * host() const { return (char *) tensor->data + offset; }
};

struct neuron_move {
    neuron_operand from;
    neuron_operand to;
};

// A tensor that is laid out for a kernel, or is taken back from there.
struct neuron_laid_copy {
    ggml_tensor *                      tensor;
    neuron_operand                     home;  // memory NULL: in host memory
    neuron_operand                     core;  // as the kernel has it
    std::shared_ptr<const neuron_laid> laid;
};

// A matrix as kernels for more columns want it, such as a mask that hides what is beyond the node's cache; or numbers of rows that count
// from another row on. Nodes with the same one share it.
struct neuron_long_mask {
    const ggml_tensor * mask;
    neuron_operand      from;        // memory NULL: in host memory
    neuron_operand      to;
    neuron_wider        wider;       // columns are numbers where they count from a row
    size_t              offset = 0;  // in the mask's tensor: of a stream
    int64_t             first  = 0;  // from which row numbers count
    neuron_blocks       named{};     // blocks whose rows are named; where neither is, it is a matrix

    const uint8_t * host() const { return (const uint8_t *) mask->data + offset; }
};

// A node of a graph, as it was when it was planned.
struct neuron_member {
    int           index;  // in cgraph->nodes
    ggml_tensor * node;
    const void *  data;   // node->data, to see that the graph was not allocated again
};

// Numbers that kernels are given.
struct neuron_planned_numbers {
    std::vector<int>   of;      // members whose they are, by their places
    std::vector<float> values;  // those that kernels are bound to
};

// A kernel that is bound.
struct neuron_planned_launch {
    neuron_bound_launch *   bound_launch;
    std::atomic<uint64_t> * counter;  // of a graph kernel; else NULL
};

// A node of a graph, or a group of nodes or attention, with everything that is known about it.
struct neuron_planned {
    std::vector<neuron_member> members;           // in their order; of a node alone one

    bool    fused   = false;                      // a graph kernel computes the members
    bool    other   = false;                      // kernels are for other numbers of tokens, or a longer cache
    int64_t padding = 0;                          // rows that they compute beyond the members' own, or twice

    bool unusable = false;                        // its kernel is broken or does not fit

    std::vector<neuron_planned_launch> launches;  // in turn; none: the CPU computes members whose result is not 0

    std::vector<neuron_planned_numbers> numbers;

    std::vector<neuron_long_mask> masks;
    std::vector<neuron_laid_copy> laid_out;
    std::vector<neuron_transfer>  uploads;
    std::vector<neuron_move>     before;  // of operands that are not where the kernel needs them, or of more rows there
    std::vector<neuron_move>     after;   // of results, for the same reasons
    std::vector<neuron_transfer> downloads;
    std::vector<neuron_laid_copy> taken_back;

    ggml_tensor * last() const { return members.back().node; }
};

// Returns numbers of members.
std::vector<float> neuron_numbers_of(const std::vector<neuron_member> & members, const std::vector<int> & of);

struct neuron_plan {
    uint64_t epoch         = 0;  // of the core, when the launches were bound
    uint64_t last_used     = 0;
    int      n_graph_nodes = 0;
    bool     whole         = true;   // false: a kernel could not be bound, but may be the next time
    bool     fused         = false;  // groups were looked for

    std::array<uint32_t, NEURON_UNGROUPED_COUNT> outside{};  // nodes that are in no group, by reason

    std::vector<neuron_planned>          nodes;              // those that have to be computed
    std::vector<neuron_causal_condition> causal_conditions;  // without which it must not be used
    std::vector<neuron_row_condition>    row_conditions;     // the same
    std::vector<neuron_hidden_condition> hidden_conditions;  // the same

    bool has_conditions() const {
        return !causal_conditions.empty() || !row_conditions.empty() || !hidden_conditions.empty();
    }
};

// Sets `operand` to where a tensor is on the core: memory NULL when it is in host memory. Returns false when it is on
// neither.
using neuron_locate_t = bool (*)(const neuron_core & core, const ggml_tensor * t, neuron_operand & operand);

// Makes the plans of one backend and keeps them.
class neuron_planner {
  public:
    neuron_planner(neuron_core &               core,
                   const neuron_kernel_store & kernels,
                   neuron_fusion &             fusion,
                   neuron_locate_t             locate) : core(core), kernels(kernels), fusion(fusion), locate(locate) {}

    // locked. Sets `plan` to the graph's, which is made on first use, and again when what it refers to is gone or when not
    // all of it could be made. It is good until the next call. A graph whose groups are cut in pieces has another one, for when a
    // mask does not hide from a piece what later ones write; so has one whose kernels have the first rows of a cache, for when others
    // are written, and one whose kernels leave out cells, for when a mask does not hide them.
    enum ggml_status get(const ggml_cgraph * cgraph, const neuron_plan ** plan);

    // Returns the groups of a graph that is yet to be given memory, good until the next call. They are kept for its plan. Called by the
    // thread that the backend is used by, as `get` is.
    const neuron_groups & find_groups(const ggml_cgraph * cgraph);

  private:
    neuron_groups    take_groups(const ggml_cgraph * cgraph, neuron_unmet unmet);
    enum ggml_status make(const ggml_cgraph * cgraph, neuron_unmet unmet, neuron_plan & plan);
    enum ggml_status make(const ggml_cgraph * cgraph, neuron_groups & groups, neuron_unmet unmet, neuron_plan & plan);
    enum ggml_status keep(const ggml_cgraph * cgraph, neuron_unmet unmet, neuron_plan *& plan);
    enum ggml_status check(const neuron_plan & plan, neuron_unmet & unmet) const;
    bool             is_valid(const ggml_cgraph * cgraph, const neuron_plan & plan) const;
    void             forget();

    neuron_core &               core;
    const neuron_kernel_store & kernels;
    neuron_fusion &             fusion;
    const neuron_locate_t       locate;

    // By cgraph->uid, and by content for graphs that have none; for each what is not met.
    std::unordered_map<uint64_t, neuron_plan>   by_uid[neuron_unmet::N];
    std::unordered_map<uint64_t, neuron_plan>   by_content[neuron_unmet::N];
    std::unordered_map<uint64_t, neuron_groups> found;          // by what they depend on
    size_t                                      n_planned = 0;  // nodes in all plans, and 1 for each plan
    uint64_t                                    clock     = 0;
};
