// A chain: parts and reductions of ggml's meta backend (-sm tensor) that one program computes on all ranks. A rank is
// one of the backends that a comm reduces over.
//
// If a bundle has kernels with reductions inside (all_reduce) for this number of ranks, the chain keeps each part and
// the reductions behind it. It computes them when the last rank has its last part (the one with an output), or at any
// other call of a backend. Then each rank's parts form one graph, whose groups may contain reductions. If all ranks
// launch the same kernels in the same order, these are launched on all ranks. Otherwise parts are computed and summed
// one after the other, as without a chain.

#pragma once

#include "ggml-impl.h"
#include "ggml/backend.h"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

class neuron_chain {
  public:
    // Replaces each rank's tensor by the sum of all. On failure reports it and returns false.
    using reduce_t = std::function<bool(ggml_tensor ** tensors)>;

    neuron_chain(std::vector<ggml_backend_neuron_context *> ranks, reduce_t reduce);
    ~neuron_chain();
    neuron_chain(const neuron_chain &) = delete;

    // Keeps a part, or with the last part computes all kept steps and sets `status`. Returns false when the caller must
    // compute the part.
    bool append(ggml_backend_neuron_context * rank, ggml_cgraph * part, enum ggml_status & status);

    // Keeps a reduction behind the kept parts. Returns false when there are no parts.
    bool append(ggml_tensor ** tensors);

    // Computes the kept steps.
    enum ggml_status flush();

    // Makes the next graph of the first rank fail; the first rank gets a graph before the others. Other failures are
    // cleared.
    void fail() const;

  private:
    // A part of a rank, or a reduction.
    struct step {
        size_t                     rank = 0;
        std::optional<ggml_cgraph> part{};     // none: a reduction. A copy: the caller's may be gone after the call
        std::vector<ggml_tensor *> tensors{};  // of a reduction, by rank
    };

    struct chain_graph {
        std::unique_ptr<ggml_context, void (*)(ggml_context *)> tensors{ nullptr, ggml_free };
        ggml_cgraph *                                           graph = nullptr;
    };

    // Results of the analysis of steps, by the numbers of their parts.
    struct known {
        bool                       usable = true;
        std::vector<chain_graph>   graphs{};  // by rank
        std::unordered_set<size_t> unread{};  // reductions whose sum has no reader
    };

    enum class outcome { DONE, FAILED, UNUSABLE };

    bool             has_collective(const neuron_planned & planned) const;
    void             find_unread(const std::vector<step> & steps, known & k) const;
    void             make(const std::vector<step> & steps, known & k) const;
    bool             load(known & k);
    outcome          compute(known & k);
    enum ggml_status compute_in_turn(std::vector<step> & steps, const known & k);
    NRT_STATUS       finish() const;
    bool             on_all_ranks(const std::function<bool(size_t rank)> & function) const;

    const std::vector<ggml_backend_neuron_context *> ranks;
    const reduce_t                                   reduce;
    std::unordered_set<uint64_t> collective;  // neuron_kernel::neff_number of kernels for this number of ranks
    std::recursive_mutex         mutex;
    std::vector<step>            steps;
    std::map<std::vector<uint64_t>, known> chains;
};

// Computes the kept steps of all chains, before tensors are read or written, or waited for. ggml takes no status here:
// after a failure the next graph of the chain fails.
void neuron_flush_chains();
