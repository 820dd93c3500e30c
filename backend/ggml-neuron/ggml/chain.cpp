#include "ggml/chain.h"

#include "device/core.h"
#include "ggml-impl.h"
#include "ggml/device_context.h"
#include "plan/compute.h"
#include "report/log.h"
#include "report/metrics.h"
#include "report/record_graphs.h"
#include "select/group_key.h"
#include "select/groups.h"
#include "select/key_nodes.h"
#include "select/tensors.h"
#include "targets.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <unordered_map>
#include <utility>

// The most chains whose graphs are kept.
static constexpr size_t MAX_CHAINS = 64;

namespace {

struct all_chains {
    std::recursive_mutex        mutex;
    std::vector<neuron_chain *> chains;
    std::atomic<int>            n_kept{ 0 };  // chains with kept steps
};

all_chains & everything() {
    static all_chains all;
    return all;
}

// All cores load and launch programs with collectives in the same order.
std::mutex & order() {
    static std::mutex mutex;
    return mutex;
}

bool is_collective(const neuron_kernel & kernel, size_t n_ranks) {
    static const uint64_t all_reduce = nk::hash_op(NEURON_ALL_REDUCE);
    size_t                n_words    = 0;
    const uint64_t *      words      = neuron_kernels_key(kernel.bundle->handle, kernel.number, &n_words);
    const neuron_key      key(words, n_words);
    return std::any_of(key.nodes.begin(), key.nodes.end(), [n_ranks](const neuron_key_node & node) {
        return node.op == all_reduce && (uint32_t) node.params[0] == n_ranks;
    });
}

// Reports that reductions of a graph go through host memory although there are kernels with reductions inside: the
// reductions outside of groups, or all of them, with the reason `why`.
void say_over_host(const ggml_cgraph * graph, const neuron_groups & groups, size_t n_ranks, const char * why) {
    std::vector<const ggml_tensor *> sums;
    const char *                     first = why;
    for (int i = 0; why && i < graph->n_nodes; i++) {
        if (neuron_is_all_reduce(graph->nodes[i])) {
            sums.push_back(graph->nodes[i]);
        }
    }
    for (const auto & [i, reason] : groups.outside) {
        if (!why && neuron_is_all_reduce(graph->nodes[i])) {
            first = sums.empty() ? neuron_ungrouped_name(reason) : first;
            sums.push_back(graph->nodes[i]);
        }
    }
    if (!sums.empty()) {
        NEURON_WARN("sums over %zu cores go through the host's memory, %zu in a call of %lld tokens: %s (%s)\n",
                    n_ranks, sums.size(), (long long) sums[0]->ne[1], first, sums[0]->src[0]->name);
    }
}

// Returns why the runtime can't compute one program on these cores; "" when it can.
std::string rank_error(const std::vector<ggml_backend_neuron_context *> & ranks) {
    const char * visible = getenv("NEURON_RT_VISIBLE_CORES");
    const int    first   = ranks[0]->device->core->vnc;
    for (size_t rank = 0; rank < ranks.size(); rank++) {
        if (ranks[rank]->device->core->vnc != first + (int) rank) {
            return "they do not follow one another (-dev)";
        }
    }
    return neuron_rank_error(ggml_backend_neuron_shared().nrt->target, (uint32_t) ranks.size(),
                             (uint32_t) (first + (visible ? atoi(visible) : 0)));
}

bool is_reduction(const neuron_planned & planned) {
    return planned.members.size() == 1 && neuron_is_all_reduce(planned.members[0].node);
}

}  // namespace

neuron_chain::neuron_chain(std::vector<ggml_backend_neuron_context *> ranks, reduce_t reduce) :
    ranks(std::move(ranks)), reduce(std::move(reduce)) {
    const ggml_backend_neuron_reg_context & shared = ggml_backend_neuron_shared();
    if (shared.buffers == neuron_buffers::DEVICE && shared.nrt->nrt_load_collectives) {
        shared.kernels.for_each_graph([this](const neuron_kernel & kernel) {
            if (is_collective(kernel, this->ranks.size())) {
                collective.insert(kernel.neff_number());
            }
        });
    }
    const std::string why = collective.empty() ? "" : rank_error(this->ranks);
    if (!why.empty()) {
        NEURON_WARN("sums over %zu cores go through the host's memory: %s\n", this->ranks.size(), why.c_str());
        collective.clear();
    }
    const std::lock_guard<std::recursive_mutex> lock(everything().mutex);
    everything().chains.push_back(this);
}

neuron_chain::~neuron_chain() {
    flush();
    const std::lock_guard<std::recursive_mutex> lock(everything().mutex);
    auto &                                      all = everything().chains;
    all.erase(std::find(all.begin(), all.end(), this));
}

void neuron_flush_chains() {
    if (everything().n_kept == 0) {
        return;
    }
    const std::lock_guard<std::recursive_mutex> lock(everything().mutex);
    for (const auto & chain : everything().chains) {
        if (chain->flush() != GGML_STATUS_SUCCESS) {
            NEURON_ERROR("parts of a graph failed when a result was read: the next graph fails\n");
            chain->fail();
        }
    }
}

void neuron_chain::fail() const {
    const NRT_STATUS                    status = finish();
    const ggml_backend_neuron_context & told   = *ranks[0];
    const std::lock_guard<std::mutex>   lock(told.device->core->mutex);
    ranks[0]->stream.failed = status == NRT_SUCCESS ? NRT_EXEC_COMPLETED_WITH_ERR : status;
}

// Waits for all ranks' launches. Returns the first failure, and clears it for later graphs.
NRT_STATUS neuron_chain::finish() const {
    NRT_STATUS first = NRT_SUCCESS;
    for (ggml_backend_neuron_context * rank : ranks) {
        neuron_core &                     core = *rank->device->core;
        const std::lock_guard<std::mutex> lock(core.mutex);
        const NRT_STATUS                  status = core.finish(rank->stream);
        first                                    = first == NRT_SUCCESS ? status : first;
    }
    return first;
}

bool neuron_chain::append(ggml_backend_neuron_context * rank, ggml_cgraph * part, enum ggml_status & status) {
    if (collective.empty() && !neuron_recording()) {
        return false;
    }
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    status               = GGML_STATUS_SUCCESS;
    const bool next_call = rank == ranks.front() && !steps.empty() && steps.back().part;
    if (next_call || !part->uid) {
        status = flush();
        if (!part->uid || status != GGML_STATUS_SUCCESS) {
            return status != GGML_STATUS_SUCCESS;
        }
    }
    everything().n_kept += steps.empty();
    steps.push_back({ (size_t) (std::find(ranks.begin(), ranks.end(), rank) - ranks.begin()), *part });
    const bool ends = rank == ranks.back() &&
                      std::any_of(part->nodes, part->nodes + part->n_nodes,
                                  [](const ggml_tensor * node) { return node->flags & GGML_TENSOR_FLAG_OUTPUT; });
    if (ends) {
        status = flush();
    }
    return true;
}

bool neuron_chain::append(ggml_tensor ** tensors) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    if (steps.empty()) {
        return false;
    }
    steps.push_back({
        0, {},
         { tensors, tensors + ranks.size() }
    });
    return true;
}

enum ggml_status neuron_chain::flush() {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    if (steps.empty()) {
        return GGML_STATUS_SUCCESS;
    }
    std::vector<step> taken;
    taken.swap(steps);
    everything().n_kept--;
    std::vector<uint64_t> key;
    for (const step & s : taken) {
        key.push_back(s.part ? s.part->uid : 0);
    }
    if (chains.size() >= MAX_CHAINS && !chains.count(key)) {
        chains.clear();
    }
    const bool first = !chains.count(key);
    known &    k     = chains[key];
    if (first) {
        make(taken, k);
        if (neuron_recording()) {
            std::vector<ggml_cgraph *> graphs;
            for (const chain_graph & c : k.graphs) {
                graphs.push_back(c.graph);
            }
            neuron_record_split_graphs(graphs);
        }
        if (!k.usable && !collective.empty()) {
            say_over_host(k.graphs[0].graph, {}, ranks.size(), "a core has no part of a weight");
        }
        k.usable = k.usable && load(k);
        NEURON_LOG("a chain of %zu parts and reductions has %s\n", taken.size(),
                   k.usable ? "kernels with reductions inside" : "no kernels for all ranks");
    }
    const outcome o = k.usable ? compute(k) : outcome::UNUSABLE;
    return o == outcome::DONE     ? GGML_STATUS_SUCCESS
           : o == outcome::FAILED ? GGML_STATUS_FAILED
                                  : compute_in_turn(taken, k);
}

enum ggml_status neuron_chain::compute_in_turn(std::vector<step> & taken, const known & k) {
    enum ggml_status status = GGML_STATUS_SUCCESS;
    for (auto s = taken.begin(); s != taken.end() && status == GGML_STATUS_SUCCESS; ++s) {
        if (s->part) {
            status = ggml_backend_neuron_compute(*ranks[s->rank], &*s->part);
        } else if (!k.unread.count((size_t) (s - taken.begin()))) {
            (void) reduce(s->tensors.data());  // the next part fails
        }
    }
    return status;
}

// Finds reductions whose sum is read only by nodes without elements: a call without outputs ends with one.
void neuron_chain::find_unread(const std::vector<step> & taken, known & k) const {
    std::unordered_map<const ggml_tensor *, int64_t>
        left;  // for each summand, the number of readers that may have elements
    for (const step & s : taken) {
        for (int i = 0; s.part && i < s.part->n_nodes; i++) {
            const ggml_tensor * node = s.part->nodes[i];
            for (const ggml_tensor * src : node->src) {
                const auto summand = left.find(src);
                if (summand != left.end()) {
                    summand->second -= ggml_is_empty(node);
                }
            }
        }
        if (s.part) {
            const ggml_tensor * last = s.part->nodes[s.part->n_nodes - 1];
            const int64_t       uses = neuron_uses_in_graph(&*s.part, last);
            left[last]               = uses > 0 && !(last->flags & GGML_TENSOR_FLAG_OUTPUT) ? uses : -1;
        }
    }
    for (size_t i = 0; i < taken.size(); i++) {
        const std::vector<ggml_tensor *> & tensors = taken[i].tensors;
        if (!taken[i].part &&
            std::all_of(tensors.begin(), tensors.end(), [&left](const ggml_tensor * t) { return left[t] == 0; })) {
            k.unread.insert(i);
        }
    }
}

// Makes each rank's graph: its parts, and a node for each reduction. In a reader of the sum, the summand replaces the
// sum as a source.
void neuron_chain::make(const std::vector<step> & taken, known & k) const {
    find_unread(taken, k);
    for (size_t rank = 0; rank < ranks.size(); rank++) {
        size_t n = 0;
        for (const step & s : taken) {
            n += !s.part ? 1 : s.rank == rank ? (size_t) s.part->n_nodes : 0;
        }
        chain_graph c;
        c.tensors.reset(
            ggml_init({ ggml_graph_overhead_custom(2 * n + 16, false) + (taken.size() + 1) * ggml_tensor_overhead(),
                        nullptr, true }));
        c.graph        = ggml_new_graph_custom(c.tensors.get(), 2 * n + 16, false);
        const auto add = [&](ggml_tensor * node, int32_t uses) {
            const size_t at                    = ggml_hash_insert(&c.graph->visited_hash_set, node);
            c.graph->use_counts[at]            = uses;
            c.graph->nodes[c.graph->n_nodes++] = node;
        };
        for (const step & s : taken) {
            if (s.part && s.rank == rank) {
                for (int i = 0; i < s.part->n_nodes; i++) {
                    add(s.part->nodes[i], (int32_t) neuron_uses_in_graph(&*s.part, s.part->nodes[i]));
                }
            } else if (!s.part && !k.unread.count((size_t) (&s - taken.data()))) {
                ggml_tensor * summand = s.tensors[rank];
                k.usable              = k.usable && (summand->flags & GGML_TENSOR_FLAG_COMPUTE);
                ggml_tensor * sum     = ggml_view_tensor(c.tensors.get(), summand);
                sum->op               = GGML_OP_CUSTOM;
                sum->extra            = (void *) NEURON_ALL_REDUCE;
                sum->src[0]           = summand;
                sum->op_params[0]     = (int32_t) ranks.size();
                sum->flags |= GGML_TENSOR_FLAG_COMPUTE;
                sum->data       = summand->data;
                sum->buffer     = summand->buffer;
                const size_t at = ggml_hash_find(&c.graph->visited_hash_set, summand);
                if (at != GGML_HASHSET_FULL && ggml_bitset_get(c.graph->visited_hash_set.used, at)) {
                    c.graph->use_counts[at]++;
                }
                add(sum, 0);
            }
        }
        c.graph->uid = ggml_graph_next_uid();
        k.graphs.push_back(std::move(c));
    }
}

bool neuron_chain::on_all_ranks(const std::function<bool(size_t)> & function) const {
    std::vector<char>        worked(ranks.size());
    std::vector<std::thread> threads;
    for (size_t rank = 1; rank < ranks.size(); rank++) {
        threads.emplace_back([&, rank] { worked[rank] = function(rank); });
    }
    worked[0] = function(0);
    for (std::thread & thread : threads) {
        thread.join();
    }
    return std::all_of(worked.begin(), worked.end(), [](char w) { return w; });
}

// Loads a chain's programs with collectives on all ranks at once. Returns false when there are none that all ranks
// have.
bool neuron_chain::load(known & k) {
    if (collective.empty()) {  // chains are only recorded
        return false;
    }
    const std::lock_guard<std::mutex>       one(order());
    std::vector<std::vector<neuron_kernel>> kernels(ranks.size());
    for (size_t rank = 0; rank < ranks.size(); rank++) {
        const std::lock_guard<std::mutex> lock(ranks[rank]->device->core->mutex);
        const neuron_groups &             groups = ranks[rank]->planner.find_groups(k.graphs[rank].graph);
        for (const neuron_group & group : groups.groups) {
            for (const neuron_kernel & kernel : group.kernels()) {
                if (collective.count(kernel.neff_number())) {
                    kernels[rank].push_back(kernel);
                }
            }
        }
        const auto same = [](const neuron_kernel & a, const neuron_kernel & b) {
            return a.neff_number() == b.neff_number();
        };
        if (!std::equal(kernels[0].begin(), kernels[0].end(), kernels[rank].begin(), kernels[rank].end(), same)) {
            say_over_host(k.graphs[rank].graph, groups, ranks.size(), "cores would launch different kernels");
            return false;
        }
        if (rank == 0) {
            say_over_host(k.graphs[rank].graph, groups, ranks.size(), nullptr);
        }
        if (kernels[rank].empty()) {
            return false;
        }
    }
    std::vector<neuron_core *> cores;
    for (const ggml_backend_neuron_context * rank : ranks) {
        cores.push_back(rank->device->core.get());
    }
    for (const neuron_kernel & kernel : kernels[0]) {
        if (!neuron_load_on_all(cores, kernel)) {
            NEURON_ERROR("%s did not load on all of %zu cores\n"
                         "parts of graphs and reductions are computed one after the other from now on\n",
                         kernel.id(), ranks.size());
            collective.clear();
            return false;
        }
    }
    return true;
}

bool neuron_chain::has_collective(const neuron_planned & planned) const {
    return planned.members.size() > 1 && std::any_of(planned.members.begin(), planned.members.end(),
                                                     [](const auto & m) { return neuron_is_all_reduce(m.node); });
}

neuron_chain::outcome neuron_chain::compute(known & k) {
    const std::lock_guard<std::mutex>         one(order());
    std::vector<std::unique_lock<std::mutex>> graphs;
    std::vector<const neuron_plan *>          plans(ranks.size());
    std::vector<std::vector<uint64_t>>        schedules(ranks.size());
    for (size_t rank = 0; rank < ranks.size(); rank++) {
        ggml_backend_neuron_context & ctx  = *ranks[rank];
        neuron_core &                 core = *ctx.device->core;
        graphs.emplace_back(core.graph_mutex);
        const std::lock_guard<std::mutex> lock(core.mutex);
        ctx.computed = true;
        if (ctx.stream.failed != NRT_SUCCESS || core.write_staged() != NRT_SUCCESS ||
            ctx.planner.get(k.graphs[rank].graph, &plans[rank]) != GGML_STATUS_SUCCESS) {
            return outcome::UNUSABLE;
        }
        for (const neuron_planned & planned : plans[rank]->nodes) {
            if (is_reduction(planned)) {
                schedules[rank].push_back(0);
            } else if (has_collective(planned)) {
                if (planned.launches.empty()) {
                    return outcome::UNUSABLE;
                }
                for (const neuron_planned_launch & launch : planned.launches) {
                    schedules[rank].push_back(launch.bound_launch->model->kernel.neff_number() + 1);
                    schedules[rank].push_back(
                        (uint64_t) std::count_if(planned.members.begin(), planned.members.end(),
                                                 [](const neuron_member & m) { return neuron_is_all_reduce(m.node); }));
                }
            }
        }
        if (schedules[rank] != schedules[0]) {
            return outcome::UNUSABLE;
        }
    }
    std::vector<size_t> at(ranks.size());
    const auto          is_at_end = [&](size_t rank) {
        return at[rank] == plans[rank]->nodes.size() || is_reduction(plans[rank]->nodes[at[rank]]);
    };
    for (ggml_backend_neuron_context * rank : ranks) {
        const std::lock_guard<std::mutex> lock(rank->device->core->mutex);
        rank->stream.graph++;
    }
    // In a queue, programs with reductions need no thread that waits for the other ranks. Each program is queued on all
    // ranks before one rank continues, because later work, or a full queue, waits for it.
    const bool is_queued = std::all_of(ranks.begin(), ranks.end(), [](const ggml_backend_neuron_context * rank) {
        return rank->device->core->launch_queue.is_queue();
    });
    std::vector<size_t> launch(ranks.size());  // of the node at `at`, while it has a program with reductions
    const auto          run = [&](size_t rank) {
        ggml_backend_neuron_context &     ctx  = *ranks[rank];
        neuron_core &                     core = *ctx.device->core;
        const std::lock_guard<std::mutex> lock(core.mutex);
        while (!is_at_end(rank)) {
            const neuron_planned & planned  = plans[rank]->nodes[at[rank]];
            const bool             in_steps = is_queued && has_collective(planned);
            if ((in_steps ? neuron_compute_step(core, ctx.stream, planned, launch[rank])
                          : neuron_compute(core, ctx.stream, planned)) != GGML_STATUS_SUCCESS) {
                return false;
            }
            if (in_steps && launch[rank]++ < planned.launches.size()) {
                return true;
            }
            launch[rank] = 0;
            at[rank]++;
        }
        return true;
    };
    const auto run_all = [&] {
        if (!is_queued) {
            return on_all_ranks(run);
        }
        for (bool more = true; more;) {
            more = false;
            for (size_t rank = 0; rank < ranks.size(); rank++) {
                if (!run(rank)) {
                    return false;
                }
                more = more || !is_at_end(rank);
            }
        }
        return true;
    };
    bool worked = run_all();
    while (worked && at[0] < plans[0]->nodes.size()) {
        std::vector<ggml_tensor *> summands;
        for (size_t rank = 0; rank < ranks.size(); rank++) {
            summands.push_back(plans[rank]->nodes[at[rank]++].last()->src[0]);
        }
        worked = reduce(summands.data());
        worked = worked && run_all();
    }
    if (finish() != NRT_SUCCESS || !worked) {
        return outcome::FAILED;
    }
    for (size_t rank = 0; rank < ranks.size(); rank++) {
        const std::lock_guard<std::mutex> lock(ranks[rank]->device->core->mutex);
        ranks[rank]->statistics.add(k.graphs[rank].graph, *plans[rank]);
    }
    return outcome::DONE;
}
