// How a graph is computed: for each node its kernel, bound to memory, and the copies around it.
//
// The planner works in three steps: it finds each node's kernel, places its operands, and binds all kernels. It keeps
// the plan and uses it again for the same graph.

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
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

// Moves before and after a kernel's execution, for operands that are in another place than the kernel requires.

// A copy between host memory and the core, of core.size bytes.
struct neuron_transfer {
    ggml_tensor *  tensor;  // in host memory; it may be allocated again before the graph is computed again
    size_t         offset;  // in the tensor
    neuron_operand core;

    char * host() const { return (char *) tensor->data + offset; }
};

struct neuron_move {
    neuron_operand from;
    neuron_operand to;
};

// A tensor that is laid out for a kernel, or a result that is copied back from the kernel's layout.
struct neuron_laid_copy {
    ggml_tensor *                      tensor;
    neuron_operand                     home;  // memory NULL: in host memory
    neuron_operand                     core;  // in the kernel's layout
    std::shared_ptr<const neuron_laid> laid;
};

// A matrix in the form that kernels with more columns require. It is a mask with columns that hide the cells beyond the
// node's cache, or row numbers that count from another row. Nodes with the same one share it.
struct neuron_long_mask {
    const ggml_tensor * mask;
    neuron_operand      from;        // memory NULL: in host memory
    neuron_operand      to;
    neuron_wider        wider;       // columns are row numbers if `first` or `named` is set
    size_t              offset = 0;  // in the mask's tensor: a stream's part
    int64_t             first  = 0;  // the row that numbers count from
    neuron_blocks       named{};     // blocks that row numbers refer to; without this and `first`, it is a matrix

    const uint8_t * host() const { return (const uint8_t *) mask->data + offset; }
};

// A node of a graph at the time of planning.
struct neuron_member {
    int           index;  // in cgraph->nodes
    ggml_tensor * node;
    const void *  data;   // node->data, to detect a new allocation of the graph
};

// Numbers that kernels take at run time.
struct neuron_planned_numbers {
    std::vector<int>   of;      // places of the members that have these numbers
    std::vector<float> values;  // the values that kernels are bound to
};

// A bound kernel.
struct neuron_planned_launch {
    neuron_bound_launch *   bound_launch;
    std::atomic<uint64_t> * counter;  // a graph kernel's; else NULL
};

// The plan of a single node, of a group of nodes, or of attention.
struct neuron_planned {
    std::vector<neuron_member> members;  // in their order; one for a single node

    bool    fused   = false;             // a graph kernel computes the members
    bool    other   = false;             // the kernels are for other numbers of tokens, or a longer cache
    int64_t padding = 0;                 // rows that the kernels compute beyond the members' own, or twice

    bool unusable = false;               // its kernel is broken or does not fit

    std::vector<neuron_planned_launch>
        launches;  // in turn; none: the CPU computes the members, except all-zero results

    std::vector<neuron_planned_numbers> numbers;

    std::vector<neuron_long_mask> masks;
    std::vector<neuron_laid_copy> laid_out;
    std::vector<neuron_transfer>  uploads;
    std::vector<neuron_move>      before;  // for operands that are in another place, or need more rows
    std::vector<neuron_move>      after;   // for results, for the same reasons
    std::vector<neuron_transfer>  downloads;
    std::vector<neuron_laid_copy> taken_back;

    ggml_tensor * last() const { return members.back().node; }
};

// Returns the numbers of members, in the order of `of`.
std::vector<float> neuron_numbers_of(const std::vector<neuron_member> & members, const std::vector<int> & of);

// Kinds of ops without a kernel, with their numbers.
using neuron_reasons = std::map<std::string, size_t>;

// A plan's ops on the device, and its others.
struct neuron_plan_ops {
    size_t         device = 0;
    neuron_reasons reasons{};
};

struct neuron_plan {
    uint64_t epoch         = 0;  // the core's, when the launches were bound
    uint64_t last_used     = 0;
    int      n_graph_nodes = 0;
    bool     whole         = true;   // false: a kernel could not be bound, but may be the next time
    bool     fused         = false;  // the planner looked for groups

    std::array<uint32_t, NEURON_UNGROUPED_COUNT> outside{};  // nodes in no group, by reason

    std::vector<neuron_planned>          nodes;              // the nodes to compute
    std::vector<neuron_causal_condition> causal_conditions;  // the plan holds only while these are met
    std::vector<neuron_row_condition>    row_conditions;     // also
    std::vector<neuron_hidden_condition> hidden_conditions;  // also

    // For neuron_statistics, which makes it on first use: descriptions of ops take longer than a launch.
    mutable std::shared_ptr<const neuron_plan_ops> ops;

    bool has_conditions() const {
        return !causal_conditions.empty() || !row_conditions.empty() || !hidden_conditions.empty();
    }
};

// Sets `operand` to a tensor's place on the core; its memory is NULL for a tensor in host memory. Returns false for a
// tensor that is in neither.
using neuron_locate_t = bool (*)(const neuron_core & core, const ggml_tensor * t, neuron_operand & operand);

// Makes and keeps the plans of one backend.
class neuron_planner {
  public:
    neuron_planner(neuron_core &               core,
                   const neuron_kernel_store & kernels,
                   neuron_fusion &             fusion,
                   neuron_locate_t             locate) : core(core), kernels(kernels), fusion(fusion), locate(locate) {}

    // locked. Sets `plan` to the graph's plan, valid until the next call. Makes it on first use, and again when the
    // objects that it refers to are gone or when it is incomplete. A graph has another plan for each set of unmet
    // conditions: when a mask does not hide from a piece the cells that later pieces write; when a graph writes other
    // rows of a cache than the first ones, which the kernels have; and when a mask does not hide the cells that kernels
    // leave out.
    enum ggml_status get(const ggml_cgraph * cgraph, const neuron_plan ** plan);

    // Returns the groups of a graph that is not allocated yet, valid until the next call. They are kept for its plan.
    // Only the thread that uses the backend may call this, as with `get`.
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

    // By cgraph->uid, and by content for graphs without one; an element for each set of unmet conditions.
    std::unordered_map<uint64_t, neuron_plan>   by_uid[neuron_unmet::N];
    std::unordered_map<uint64_t, neuron_plan>   by_content[neuron_unmet::N];
    std::unordered_map<uint64_t, neuron_groups> found;          // by a hash of their inputs
    size_t                                      n_planned = 0;  // nodes in all plans, and 1 per plan
    uint64_t                                    clock     = 0;
};
