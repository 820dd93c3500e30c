// A chain of parts and reductions of ggml's meta backend (-sm tensor) that one program computes on all ranks: a rank is one of the
// backends that a comm reduces over.
//
// Where a bundle has kernels with reductions inside (all_reduce) for as many ranks, a part is not computed when ggml gives it, but kept
// with the reductions behind it until the last rank has its last part, the one with an output, or until something else is asked of any
// backend. Then each rank's parts are one graph, and its groups may have reductions inside. What all ranks would launch in the same
// order is launched on all of them; else parts are computed and added one after the other, as without a chain.

#pragma once

#include "ggml/backend.h"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

class neuron_chain {
  public:
    // Replaces each rank's tensor by the sum of all. Returns false when that fails, which it has reported.
    using reduce_t = std::function<bool(ggml_tensor ** tensors)>;

    neuron_chain(std::vector<ggml_backend_neuron_context *> ranks, reduce_t reduce);
    ~neuron_chain();
    neuron_chain(const neuron_chain &) = delete;

    // Keeps a part, or computes what is kept when it is the last one, and sets `status`. Returns false when it is to be computed at once.
    bool append(ggml_backend_neuron_context * rank, ggml_cgraph * part, enum ggml_status & status);

    // Keeps a reduction behind the parts that are kept. Returns false when there are none.
    bool append(ggml_tensor ** tensors);

    // Computes what is kept.
    enum ggml_status flush();

    // Has the next graph fail, which the first rank is given first, and no other one.
    void fail() const;

  private:
    // A part of a rank, or a reduction.
    struct step {
        size_t                     rank = 0;
        ggml_cgraph *              part = nullptr;  // NULL: a reduction
        std::vector<ggml_tensor *> tensors{};       // of a reduction, by rank
    };

    struct chain_graph {
        std::unique_ptr<ggml_context, void (*)(ggml_context *)> tensors{ nullptr, ggml_free };
        ggml_cgraph *                                           graph = nullptr;
    };

    // What is known of steps by the numbers of their parts.
    struct known {
        bool                       usable = true;
        std::vector<chain_graph>   graphs{};  // by rank
        std::unordered_set<size_t> unread{};  // steps that are reductions whose sum nobody needs
    };

    enum class outcome { DONE, FAILED, UNUSABLE };

    bool             has_collective(const neuron_planned & planned) const;
    void             find_unread(const std::vector<step> & steps, known & k) const;
    void             make(const std::vector<step> & steps, known & k) const;
    bool             load(known & k);
    outcome          compute(const std::vector<step> & steps, known & k);
    enum ggml_status compute_in_turn(std::vector<step> & steps, const known & k);
    NRT_STATUS       finish() const;
    bool             on_all_ranks(const std::function<bool(size_t rank)> & function) const;

    const std::vector<ggml_backend_neuron_context *> ranks;
    const reduce_t                                   reduce;
    std::unordered_set<uint64_t>           collective;  // neuron_kernel::neff_number of kernels for as many ranks
    std::recursive_mutex                   mutex;
    std::vector<step>                      steps;
    std::map<std::vector<uint64_t>, known> chains;
};

// Computes what any chain keeps, before tensors are read or written, or waited for. ggml can't be told that this fails: the next graph
// of the chain fails then.
void neuron_flush_chains();
