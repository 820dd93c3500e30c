#include "select/groups.h"

#include "../../bundle/src/graph_key.h"
#include "../../bundle/src/hash.h"
#include "../../bundle/src/key.h"
#include "select/group_choice.h"
#include "select/numbers.h"
#include "select/streams.h"
#include "select/tensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

const char * neuron_ungrouped_name(int reason) {
    static const char * const names[NEURON_UNGROUPED_COUNT] = {
        "no group has such a node",
        "their groups have other nodes beside them",
        "their group has no kernel for this many tokens and cells, nor for more",
        "their group is for fewer tokens, of which the first see what later ones write",
        "their part of the graph ends before the group does",
        "their group is wired in another way",
        "another result of their group is used outside of it",
        "their group's tensors overlap",
        "their group's kernel can't be used",
    };
    return names[reason];
}

bool neuron_is_watched(const ggml_cgraph * cgraph) {
    return !cgraph->uid && cgraph->n_leafs == 0 && cgraph->visited_hash_set.size != 0;
}

//
// what is seen outside of a group
//

namespace {

// Where the roots of a group's tensors are.
class group_roots {
  public:
    group_roots(const ggml_cgraph * cgraph, const std::vector<int> & nodes, const neuron_streams * streams) {
        references.reserve(2 * nodes.size());
        for (size_t i = 0; i < nodes.size(); i++) {
            ggml_tensor * node = cgraph->nodes[nodes[i]];
            if (!node->view_src) {
                references.emplace(node, nk::graph_reference{ false, i });
            }
            if (streams && streams->result_of(node) != node) {
                references.emplace(streams->result_of(node), nk::graph_reference{ false, i });
            }
        }
    }

    // Returns the node whose memory a tensor is in, or -1.
    int64_t node_of(ggml_tensor * t) const {
        const auto found = references.find(neuron_root_of(t));
        return found == references.end() || found->second.is_slot ? -1 : (int64_t) found->second.index;
    }

    // Returns the reference to a tensor's root, with a new slot when it has none, or the one that it has in a kernel.
    nk::graph_reference refer(ggml_tensor *               t,
                              size_t                      begin,
                              size_t                      size,
                              bool                        writes,
                              const nk::graph_reference * kernels,
                              neuron_group &              group) {
        ggml_tensor * root  = neuron_root_of(t);
        const auto    found = references.emplace(root, nk::graph_reference{ true, group.slots.size() });
        auto          where = found.first->second;
        if (!where.is_slot) {
            return where;
        }
        if (kernels && kernels->is_slot && kernels->index <= group.slots.size()) {
            where = *kernels;
        }
        const size_t end = begin + size;
        if (where.index == group.slots.size()) {
            group.slots.push_back({ root, begin, end - begin, writes });
            return where;
        }
        neuron_group_slot & slot = group.slots[where.index];
        if (slot.tensor != root) {
            mixed = true;
        }
        const size_t last = std::max(end, slot.offset + slot.size);
        slot.offset       = std::min(slot.offset, begin);
        slot.size         = last - slot.offset;
        slot.written      = slot.written || writes;
        slot.summed       = slot.summed || (writes && neuron_is_all_reduce(t));
        return where;
    }

    // Returns whether no kernel has these slots: one has several tensors, or what a node writes to has several slots.
    bool are_wrong(const neuron_group & group) const {
        std::unordered_map<const ggml_tensor *, std::pair<size_t, bool>>
            roots;  // with their slots, and whether one is written
        for (const neuron_group_slot & slot : group.slots) {
            auto & root = roots[slot.tensor];
            root.first++;
            root.second = root.second || slot.written;
        }
        return mixed || std::any_of(roots.begin(), roots.end(),
                                    [](const auto & root) { return root.second.first > 1 && root.second.second; });
    }

  private:
    std::unordered_map<const ggml_tensor *, nk::graph_reference> references;
    bool                                                         mixed = false;  // a slot has several tensors
};

}  // namespace

int64_t neuron_uses_in_graph(const ggml_cgraph * cgraph, const ggml_tensor * t) {
    const ggml_hash_set & set = cgraph->visited_hash_set;
    if (!set.size || !cgraph->use_counts) {
        return -1;
    }
    const size_t at = ggml_hash_find(&set, t);
    return at != GGML_HASHSET_FULL && ggml_bitset_get(set.used, at) ? cgraph->use_counts[at] : -1;
}

// Returns which nodes with memory of their own are seen outside: they, or views of them, are used there or not at all, are
// outputs, or are looked at.
static std::vector<bool> find_escapes(const ggml_cgraph *      cgraph,
                                      const std::vector<int> & nodes,
                                      const group_roots &      roots,
                                      const neuron_streams *   streams,
                                      bool                     watched) {
    std::vector<bool>                                escapes(nodes.size());
    std::unordered_map<const ggml_tensor *, int64_t> uses;
    std::vector<ggml_tensor *>                       all_nodes;  // ggml's
    for (int i = nodes.front(); i <= nodes.back(); i++) {
        ggml_tensor * node = streams ? streams->node(i) : cgraph->nodes[i];
        if (all_nodes.empty() || all_nodes.back() != node) {
            all_nodes.push_back(node);
        }
    }
    for (const ggml_tensor * node : all_nodes) {
        for (ggml_tensor * src : node->src) {
            if (src && roots.node_of(src) >= 0) {
                uses[src]++;
            }
        }
    }
    for (ggml_tensor * t : all_nodes) {
        const int64_t node = roots.node_of(t);
        // a node that reads a sum has the summand as its source
        if (node < 0 || escapes[(size_t) node] || neuron_is_all_reduce(t)) {
            continue;
        }
        const int64_t all      = neuron_uses_in_graph(cgraph, t);
        escapes[(size_t) node] = all <= 0 || uses[t] < all || (t->flags & GGML_TENSOR_FLAG_OUTPUT);
    }
    if (watched) {
        ggml_tensor * last   = cgraph->nodes[cgraph->n_nodes - 1];
        const auto    escape = [&](ggml_tensor * t) {
            if (t && roots.node_of(t) >= 0) {
                escapes[(size_t) roots.node_of(t)] = true;
            }
        };
        escape(last);
        std::for_each(std::begin(last->src), std::end(last->src), escape);
    }
    return escapes;
}

//
// keys
//

namespace {

// Words of a key in which an offset counts from its slot's beginning, which is known when all uses are.
struct late_offset {
    size_t word;
    size_t slot;
};

class group_key {
  public:
    group_key(const ggml_cgraph *    cgraph,
              bool                   watched,
              const uint64_t *       kernel,
              neuron_variant         variant,
              const neuron_streams * streams,
              neuron_group &         group) :
        cgraph(cgraph), group(group), kernel(kernel ? nk::first_graph_node(kernel) : nullptr), variant(variant),
        roots(cgraph, group.nodes, streams), escapes(find_escapes(cgraph, group.nodes, roots, streams, watched)) {}

    // Returns an empty key when no kernel has such nodes.
    std::vector<uint64_t> make() {
        group.slots.clear();
        group.results.clear();
        for (size_t i = 0; i < group.nodes.size(); i++) {
            if (!add_node(cgraph->nodes[group.nodes[i]], escapes[i])) {
                return {};
            }
        }
        if (roots.are_wrong(group)) {
            return {};
        }
        for (const late_offset & l : late) {
            nodes[l.word] -= group.slots[l.slot].offset;
        }
        std::vector<uint64_t> words = { nk::hash_op(nk::GRAPH), group.nodes.size() | (uint64_t) group.slots.size()
                                                                                         << 32 };
        words.reserve(2 + group.slots.size() + nodes.size());
        for (const neuron_group_slot & slot : group.slots) {
            words.push_back(slot.size);
        }
        words.insert(words.end(), nodes.begin(), nodes.end());
        return words;
    }

  private:
    // Sets two words to what a tensor refers to, and where in that. The kernel's own word says which slot it has there.
    void refer(ggml_tensor * t, neuron_range rows, bool writes, const uint64_t * kernels, size_t at) {
        const nk::graph_reference has       = nk::read_reference(kernels ? *kernels : 0);
        const size_t              row       = t->nb[NEURON_SET_ROWS_AXIS];
        const size_t              begin     = neuron_offset_of(t) + (size_t) rows.first * row;
        const size_t              size      = rows.n ? (size_t) rows.n * row : ggml_nbytes(t);
        const nk::graph_reference reference = roots.refer(t, begin, size, writes, kernels ? &has : nullptr, group);
        nodes[at]                           = nk::reference_word(reference) + writes;
        nodes[at + 1]                       = begin;
        if (reference.is_slot) {
            late.push_back({ at + 1, reference.index });
        }
    }

    bool add_tensor(const ggml_tensor * t, int64_t n_rows) {
        const size_t at = nodes.size();
        nodes.resize(at + nk::TENSOR_WORDS);
        if (!n_rows) {
            return neuron_tensor_words(t, &nodes[at]);
        }
        ggml_tensor rows              = *t;
        rows.ne[NEURON_SET_ROWS_AXIS] = n_rows;
        return neuron_tensor_words(&rows, &nodes[at]);
    }

    // Returns the rows of what a SET_ROWS writes that the group has: those that its other nodes read, the first ones or those of a sequence
    // that has a cache of its own. 0 where it has all: also where they step further than a row, as over values without flash attention and
    // over streams, so that strides have the length of all.
    neuron_range rows_of(const ggml_tensor * node) const {
        const ggml_tensor * into = node->op == GGML_OP_SET_ROWS ? node->src[NEURON_SET_ROWS_INTO] : nullptr;
        if (!variant.first_rows || !into || into->ne[2] != 1 || into->ne[3] != 1) {
            return {};
        }
        const size_t row   = into->nb[NEURON_SET_ROWS_AXIS];
        const size_t begin = neuron_offset_of(into);
        size_t       first = SIZE_MAX;
        size_t       end   = begin;
        if (row != ggml_row_size(into->type, into->ne[0]) || neuron_offset_of(node) != begin) {
            return {};
        }
        for (const int i : group.nodes) {
            const ggml_tensor * reader = cgraph->nodes[i];
            for (int s = 0; s < neuron_n_src(reader); s++) {
                const ggml_tensor * t = reader->src[s];
                if (!t || neuron_root_of(t) != neuron_root_of(into) || reader->op == GGML_OP_SET_ROWS) {
                    continue;
                }
                for (int axis = 1; axis < GGML_MAX_DIMS; axis++) {
                    if (t->ne[axis] > 1 && t->nb[axis] > row) {
                        return {};
                    }
                }
                first = std::min(first, neuron_offset_of(t));
                end   = std::max(end, neuron_offset_of(t) + ggml_nbytes(t));
            }
        }
        if (first == SIZE_MAX || first < begin || (first - begin) % row != 0) {
            return {};
        }
        const auto n = (int64_t) ((end - first + row - 1) / row);
        return n < into->ne[NEURON_SET_ROWS_AXIS] ? neuron_range{ (int64_t) ((first - begin) / row), n }
                                                  : neuron_range{};
    }

    bool add_node(ggml_tensor * node, bool escaping) {
        const int        n_src  = neuron_n_src(node);
        const size_t     head   = nodes.size();
        const uint64_t * result = kernel ? kernel + 2 : nullptr;
        const uint64_t * inputs = nullptr;
        if (kernel) {
            const nk::graph_node its = nk::read_graph_node(kernel);
            if (its.n_inputs != (uint64_t) n_src || (its.result != 0) != (node->view_src != nullptr)) {
                return false;
            }
            inputs = its.inputs;
            kernel = its.end;
        }
        nodes.insert(nodes.end(),
                     { nk::hash_op(neuron_op_desc(node)), (uint64_t) n_src | (uint64_t) escaping << 32, 0, 0 });
        const neuron_range rows = rows_of(node);
        if (!add_tensor(node, rows.n)) {
            return false;
        }
        for (int i = 0; i < n_src; i++) {
            const uint64_t * its = inputs;
            if (inputs && (nk::next_graph_input(inputs) != nullptr) != (node->src[i] != nullptr)) {
                return false;
            }
            if (!node->src[i]) {
                nodes.push_back(nk::ABSENT_WORD);
                continue;
            }
            const neuron_range own = i == (int) NEURON_SET_ROWS_INTO ? rows : neuron_range{};
            const size_t       at  = nodes.size();
            nodes.resize(at + nk::GRAPH_INPUT_WORDS);
            refer(node->src[i], own, false, its, at);
            if (!add_tensor(node->src[i], own.n)) {
                return false;
            }
        }
        const size_t params = nodes.size();
        nodes.resize(params + nk::PARAM_WORDS);
        const neuron_params own = variant.open ? neuron_open_params_of(node) : neuron_params_of(node);
        std::copy(own.begin(), own.end(), nodes.begin() + (std::ptrdiff_t) params);
        if (variant.causal && neuron_may_be_causal(node)) {
            nodes[params + NEURON_CAUSAL_WORD] |= NEURON_CAUSAL_BIT;
        }
        if (node->view_src) {
            refer(node, rows, true, result, head + 2);
        }
        if (escaping) {
            group.results.push_back({ node, ggml_nbytes(node) });
        }
        return true;
    }

    const ggml_cgraph *      cgraph;
    neuron_group &           group;
    const uint64_t *         kernel;  // its next node; NULL: slots are numbered by first use
    const neuron_variant     variant;
    group_roots              roots;
    const std::vector<bool>  escapes;
    std::vector<uint64_t>    nodes;
    std::vector<late_offset> late;
};

}  // namespace

std::vector<uint64_t> neuron_group_words(const ggml_cgraph *    cgraph,
                                         bool                   watched,
                                         neuron_group &         group,
                                         const uint64_t *       kernel,
                                         neuron_variant         variant,
                                         const neuron_streams * streams) {
    return group_key(cgraph, watched, kernel, variant, streams, group).make();
}

//
// searching
//

namespace {

class group_search {
  public:
    group_search(const ggml_cgraph *         cgraph,
                 const neuron_kernel_store & kernels,
                 bool                        watched,
                 neuron_unmet                unmet,
                 const neuron_streams *      streams = nullptr) :
        cgraph(cgraph), kernels(kernels), watched(watched), unmet(unmet), streams(streams) {
        for (int i = 0; i < cgraph->n_nodes; i++) {
            if (neuron_is_work(cgraph->nodes[i])) {
                work.push_back(i);
                tokens.push_back(neuron_token_of(cgraph->nodes[i]));
            }
        }
        hashes = neuron_token_hashes(tokens);
        for (const int i : work) {
            reasons.push_back(kernels.groups.has_member(cgraph->nodes[i]) ? NEURON_UNGROUPED_PLACE
                                                                          : NEURON_UNGROUPED_OP);
        }
    }

    neuron_groups run() {
        neuron_groups found;
        for (size_t i = 0; i < work.size();) {
            neuron_group group;
            if (find_at(i, group)) {
                add_numbers(group);
                i += group.nodes.size();
                found.groups.push_back(std::move(group));
            } else {
                found.outside.emplace_back(work[i], reasons[i]);
                i++;
            }
        }
        return found;
    }

  private:
    void note(size_t first, size_t n, neuron_ungrouped reason) {
        for (size_t i = first; i < first + n; i++) {
            reasons[i] = std::max(reasons[i], reason);
        }
    }

    // Returns whether the nodes from one on have the tokens of a pattern or a family, and notes when only the first of them do.
    bool begins(size_t first, const neuron_token_hashes & of, const neuron_token_hashes & tokens) {
        const size_t left = work.size() - first;
        const size_t some = std::min(tokens.size(), left);
        if (of.part(first, some) != tokens.part(0, some)) {
            return false;
        }
        if (tokens.size() > left) {
            note(first, left, NEURON_UNGROUPED_CUT);
        }
        return tokens.size() <= left;
    }

    // Returns the key of n nodes from one on, and makes them the group.
    std::vector<uint64_t> take(size_t first, size_t n, neuron_group & group) {
        const auto begin = work.begin() + (std::ptrdiff_t) first;
        group.nodes.assign(begin, begin + (std::ptrdiff_t) n);
        return neuron_group_words(cgraph, watched, group, nullptr, variant, streams);
    }

    // Finds the group that begins with a node: the longest one that has a kernel of its own lengths, except where a kernel for other
    // numbers of tokens, or for a longer cache, computes more nodes in one launch; else the longest one that such kernels compute.
    bool find_at(size_t first, neuron_group & group) {
        if (!find_exact(first, group)) {
            return !kernels.is_exact_only() && find_longer(first, group, 0);
        }
        const neuron_variant exact = variant;
        neuron_group         longer;
        if (!kernels.is_exact_only() && find_longer(first, longer, group.nodes.size()) && longer.pieces.size() == 1) {
            group = std::move(longer);
        } else {
            variant = exact;
        }
        return true;
    }

    // Gives a group whose kernels are for any numbers a slot with those of its nodes.
    void add_numbers(neuron_group & group) const {
        neuron_group_slot slot;
        for (size_t i = 0; variant.open && i < group.nodes.size(); i++) {
            if (neuron_has_numbers(cgraph->nodes[group.nodes[i]])) {
                slot.numbers.push_back((int) i);
            }
        }
        if (!slot.numbers.empty()) {
            group.slots.push_back(std::move(slot));
        }
    }

    // Calls `find` with the keys of n nodes from one on, which become the group, until it returns true: that of the nodes' own numbers
    // before that of any; that of causal attention, where there is such a kernel, before others; and that of the first rows of caches alone
    // before or after that of all.
    //
    // begin  whether those of first rows are the first ones
    template <typename F> bool find_either(size_t first, size_t n, neuron_group & group, bool begin, F find) {
        const bool may_be_causal = kernels.groups.has_causal() && !streams &&
                                   std::any_of(work.data() + first, work.data() + first + n,
                                               [this](int i) { return neuron_may_be_causal(cgraph->nodes[i]); });
        const bool may_be_open =
            kernels.groups.has_open() && std::any_of(work.data() + first, work.data() + first + n,
                                                     [this](int i) { return neuron_has_numbers(cgraph->nodes[i]); });
        for (size_t i = 0; i < neuron_variant::N; i++) {
            variant         = { (i & 1) ? !begin : begin, (i & 2) == 0, (i & 4) != 0 };
            const bool none = (variant.causal && !may_be_causal) || (variant.open && !may_be_open);
            if (!none && !(variant.first_rows && unmet.rows) && find(take(first, n, group))) {
                return true;
            }
        }
        return false;
    }

    // Computes the tokens without extents, when they are first needed.
    void loosen() {
        if (loose.empty()) {
            for (const int i : work) {
                loose.push_back(neuron_token_of(cgraph->nodes[i], neuron_token_kind::WITHOUT_EXTENTS));
            }
            loose_hashes = neuron_token_hashes(loose);
        }
    }

    // least  nodes of groups that are not looked for
    bool find_longer(size_t first, neuron_group & group, size_t least) {
        loosen();
        const ggml_tensor * node     = cgraph->nodes[work[first]];
        const auto *        families = kernels.groups.families_beginning_with(loose[first], node->ne[0]);
        if (!families) {
            return false;
        }
        for (const neuron_group_family & family : *families) {
            const size_t n = family.tokens.size();
            if (n <= least || !begins(first, loose_hashes, family.tokens)) {
                continue;
            }
            // where no kernel has this length, those for first rows are the shorter ones
            if (find_either(first, n, group, true, [&](std::vector<uint64_t> words) {
                    return !words.empty() && choose(family, std::move(words), group);
                })) {
                return true;
            }
            note(first, n, NEURON_UNGROUPED_LENGTH);
        }
        return false;
    }

    // Gives the group a slot for each that a kernel has: tensors that are one in the graph may be several in the kernel. Returns
    // its key, or none when the kernel's slots are other ones.
    std::vector<uint64_t> spread(const neuron_group_kernel &   kernel,
                                 const std::vector<uint64_t> & words,
                                 neuron_group &                group) {
        if (kernel.n_words <= words.size()) {
            return {};
        }
        neuron_group          other  = group;
        std::vector<uint64_t> spread = neuron_group_words(cgraph, watched, other, kernel.key, variant, streams);
        if (spread.size() != kernel.n_words) {
            return {};
        }
        group = std::move(other);
        return spread;
    }

    // What was chosen last of a family, and for which groups.
    struct choice {
        std::vector<uint64_t>       words;
        std::vector<size_t>         room;              // from where each slot begins to the end of its tensor
        const neuron_group_kernel * sample = nullptr;  // whose slots the group gets; NULL: nothing was found
        neuron_group_choice         found;
    };

    // Chooses the kernels of a family that compute a group with this key.
    bool choose(const neuron_group_family & family, std::vector<uint64_t> words, neuron_group & group) {
        choice &            last = chosen[&family][variant.index()];
        std::vector<size_t> room;
        room.reserve(group.slots.size());
        for (const neuron_group_slot & slot : group.slots) {
            room.push_back(neuron_room_of(slot.tensor) - slot.offset);
        }
        if (last.words != words || last.room != room) {  // else a layer like the one before
            last = { std::move(words), std::move(room), nullptr, {} };
            search(family, group, last);
        }
        if (!last.sample ||
            (last.sample->n_words != last.words.size() && spread(*last.sample, last.words, group).empty())) {
            return false;
        }
        return use(last, group);
    }

    // Searches kernels of as many slots together: those that have a slot for each tensor first.
    void search(const neuron_group_family & family, const neuron_group & group, choice & c) {
        for (const neuron_group_kernel & first : family.kernels) {
            const bool   seen  = std::any_of(family.kernels.data(), &first,
                                             [&](const neuron_group_kernel & k) { return k.n_words == first.n_words; });
            neuron_group other = group;
            const std::vector<uint64_t> own = seen ? std::vector<uint64_t>() : words_for(first, c.words, other);
            if (own.empty()) {
                continue;
            }
            std::vector<const neuron_group_kernel *> all;
            for (const neuron_group_kernel & kernel : family.kernels) {
                if (kernel.n_words == first.n_words) {
                    all.push_back(&kernel);
                }
            }
            const neuron_key    key(own.data(), own.size());
            neuron_group_choice found = neuron_choose_kernels(
                all, key, [&](const neuron_group_kernel & kernel, bool whole) -> std::optional<neuron_group_option> {
                    neuron_group again = group;
                    if (&kernel != &first && kernel.n_words != c.words.size() &&
                        spread(kernel, c.words, again) != own) {
                        return std::nullopt;
                    }
                    auto option = may_leave_out(kernel, group) ? neuron_try_kernel(kernel, key, whole) : std::nullopt;
                    if (!option) {
                        return std::nullopt;
                    }
                    make_room(option->fit, other);
                    return other.has_room() ? std::move(option) : std::nullopt;
                });
            if (found.whole || !found.ranges.empty()) {
                c.sample = &first;
                c.found  = std::move(found);
                return;
            }
        }
    }

    std::vector<uint64_t> words_for(const neuron_group_kernel &   kernel,
                                    const std::vector<uint64_t> & words,
                                    neuron_group &                group) {
        return kernel.n_words == words.size() ? words : spread(kernel, words, group);
    }

    static neuron_kernel kernel_of(const neuron_group_option & option) {
        return { option.kernel->bundle, option.kernel->number };
    }

    // Gives a group's slots what a kernel has.
    void make_room(const neuron_group_fit & fit, neuron_group & group) const {
        for (size_t i = 0; i < group.slots.size(); i++) {
            neuron_group_slot &       slot = group.slots[i];
            const neuron_group_room & room = fit.slots[i];
            slot.room                      = room;
            slot.mask = room.kind == neuron_group_room::WIDER ? cgraph->nodes[group.nodes[room.node]]->src[room.source]
                                                              : nullptr;
        }
    }

    // Computes a group as was chosen: in pieces where that is better and possible, else all of it at once.
    bool use(const choice & c, neuron_group & group) {
        const bool in_pieces = !c.found.ranges.empty() && find_causal_conditions(c.found, group);
        if (!c.found.ranges.empty() && !in_pieces) {
            note((size_t) (std::lower_bound(work.begin(), work.end(), group.first()) - work.begin()),
                 group.nodes.size(), NEURON_UNGROUPED_ORDER);
        }
        if (!in_pieces && !c.found.whole) {
            return false;
        }
        const neuron_group_option & option = in_pieces ? c.found.options.front() : *c.found.whole;
        const neuron_group_fit &    fit    = option.fit;
        if (!find_row_conditions(kernel_of(option), group) || !can_rename(fit, group)) {
            return false;
        }
        group.hidden_conditions.clear();
        if (!in_pieces) {
            group.causal_conditions.clear();
            add_hidden_conditions(*option.kernel, {}, group);
        }
        for (const neuron_range & range : c.found.ranges) {
            if (in_pieces) {
                add_hidden_conditions(*c.found.option_for(range.n)->kernel, range, group);
            }
        }
        make_room(fit, group);
        group.fused = group.other = true;
        if (!in_pieces) {
            for (size_t i = 0; i < group.results.size(); i++) {
                group.results[i].size   = fit.results[i].size;
                group.results[i].blocks = fit.results[i].blocks;
            }
            group.pieces.push_back({ kernel_of(option) });
            group.padding = fit.padding;
            return true;
        }
        for (size_t i = 0; i < group.slots.size(); i++) {
            neuron_group_slot & slot = group.slots[i];
            slot.row                 = fit.slots[i].row;
            if (slot.room.kind == neuron_group_room::WIDER) {
                slot.room.wider.rows = fit.n;
                slot.room.size       = (size_t) fit.n * slot.row;
            }
        }
        for (size_t i = 0; i < group.results.size(); i++) {
            group.results[i].row = fit.results[i].row;
        }
        group.rows    = fit.n;
        group.padding = -fit.n;
        for (const neuron_range & range : c.found.ranges) {
            group.pieces.push_back({ kernel_of(*c.found.option_for(range.n)), range });
            group.padding += range.n;
        }
        return true;
    }

    // Returns whether numbers of rows that are other ones in a kernel are known before the graph is computed.
    bool can_rename(const neuron_group_fit & fit, const neuron_group & group) {
        for (size_t i = 0; i < group.slots.size(); i++) {
            const ggml_tensor * t = group.slots[i].tensor;
            if (fit.slots[i].named.n > 1 && (!neuron_can_read_rows(t) || is_changed(t))) {
                return false;
            }
        }
        return true;
    }

    // Sets the causal conditions for a group to be computed in pieces. Returns false when that is not known before the graph is computed,
    // or not so.
    bool find_causal_conditions(const neuron_group_choice & found, neuron_group & group) {
        group.causal_conditions.clear();
        for (const neuron_group_causal_condition & h : found.options.front().fit.causal_conditions) {
            const ggml_tensor * rows =
                cgraph->nodes[group.nodes[h.writer]]->src[neuron_group_causal_condition::ROWS_SOURCE];
            const ggml_tensor * mask = cgraph->nodes[group.nodes[h.reader]]->src[h.mask];
            if (unmet.causal || (streams && streams->part_of(rows)) || !neuron_can_tell_causality(rows, mask) ||
                is_changed(rows) || is_changed(mask)) {
                return false;
            }
            neuron_cell_map cells = h.cells;
            cells.offset -= first_row_of(cgraph->nodes[group.nodes[h.writer]], group) * (int64_t) cells.row_stride;
            group.causal_conditions.push_back({ rows, mask, cells, found.ranges });
        }
        return true;
    }

    // Calls a function with each node of a group for which a kernel leaves out cells of the mask, until it returns false.
    template <typename F>
    bool for_each_hidden(const neuron_group_kernel & kernel, const neuron_group & group, F use) const {
        if (!variant.causal) {
            return true;
        }
        const neuron_key key(kernel.key, kernel.n_words);
        for (size_t i = 0; i < group.nodes.size(); i++) {
            const neuron_causal_kernel causal(key.nodes[i]);
            const ggml_tensor *        node = cgraph->nodes[group.nodes[i]];
            if (causal.n_tokens && causal.leaves_out(node->src[NEURON_FLASH_ATTN_MASK]) && !use(node, causal)) {
                return false;
            }
        }
        return true;
    }

    // Returns whether a kernel for a group leaves out nothing, or what masks may turn out to hide when the graph is computed.
    bool may_leave_out(const neuron_group_kernel & kernel, const neuron_group & group) {
        return for_each_hidden(kernel, group, [this](const ggml_tensor * node, const neuron_causal_kernel &) {
            const ggml_tensor * mask = node->src[NEURON_FLASH_ATTN_MASK];
            return !unmet.hidden && neuron_can_read_mask(mask) && !is_changed(mask);
        });
    }

    // Adds the conditions for a kernel that may leave out cells to compute some tokens of a group, or all where `range` is empty.
    void add_hidden_conditions(const neuron_group_kernel & kernel, neuron_range range, neuron_group & group) {
        for_each_hidden(kernel, group, [&](const ggml_tensor * node, const neuron_causal_kernel & causal) {
            const neuron_range tokens = range.n ? range : neuron_range{ 0, node->src[0]->ne[1] };
            group.hidden_conditions.push_back({ node->src[NEURON_FLASH_ATTN_MASK], tokens, causal });
            return true;
        });
    }

    // Sets the row conditions for a group to be computed by a kernel, or by it and those that go together with it, which have as many rows
    // of a cache. Returns false when these are not met, or that is not known before the graph is computed.
    bool find_row_conditions(const neuron_kernel & kernel, neuron_group & group) {
        size_t           n_words;
        const uint64_t * words = neuron_kernels_key(kernel.bundle->handle, kernel.number, &n_words);
        const neuron_key key(words, n_words);
        group.row_conditions.clear();
        for (neuron_group_slot & slot : group.slots) {
            slot.first = 0;
        }
        for (size_t i = 0; i < group.nodes.size(); i++) {
            const ggml_tensor * node  = cgraph->nodes[group.nodes[i]];
            const auto          n     = (int64_t) key.nodes[i].tensor[1 + NEURON_SET_ROWS_AXIS];
            const int64_t       first = first_row_of(node, group);
            const ggml_tensor * own =
                node->op == GGML_OP_SET_ROWS ? node->src[neuron_group_causal_condition::ROWS_SOURCE] : nullptr;
            const neuron_stream_part * part = streams ? streams->part_of(own) : nullptr;
            if (part) {
                group.row_conditions.push_back({
                    part->whole, part->first, n, { part->begin, part->n }
                });
                continue;
            }
            if (!own || (!first && n >= node->ne[NEURON_SET_ROWS_AXIS])) {
                continue;
            }
            if (unmet.rows || !neuron_can_read_rows(own) || is_changed(own) || !count_from(first, own, group)) {
                return false;
            }
            group.row_conditions.push_back({ own, first, n });
        }
        return true;
    }

    // Returns which row of what a SET_ROWS writes is the first of its slot, as of a sequence that has a cache of its own.
    static int64_t first_row_of(const ggml_tensor * node, const neuron_group & group) {
        const auto   slot  = std::find_if(group.slots.begin(), group.slots.end(), [node](const neuron_group_slot & s) {
            return s.written && s.tensor == neuron_root_of(node);
        });
        const size_t begin = neuron_offset_of(node);
        return node->op != GGML_OP_SET_ROWS || slot == group.slots.end() || slot->offset <= begin
                   ? 0
                   : (int64_t) ((slot->offset - begin) / node->nb[NEURON_SET_ROWS_AXIS]);
    }

    // Lets a kernel have numbers of rows as they count from one on. Returns false where they are not all of a slot, or where another node
    // has them as they are.
    bool count_from(int64_t first, const ggml_tensor * rows, neuron_group & group) const {
        for (const int i : group.nodes) {
            const ggml_tensor * node = cgraph->nodes[i];
            for (int s = 0; s < neuron_n_src(node); s++) {
                const ggml_tensor * t = node->src[s];
                if (t && neuron_root_of(t) == neuron_root_of(rows) && first &&
                    (t->view_src || first_row_of(node, group) != first)) {
                    return false;
                }
            }
        }
        for (neuron_group_slot & slot : group.slots) {
            slot.first = slot.tensor == rows ? first : slot.first;
        }
        return true;
    }

    // Returns whether the graph computes or changes a tensor.
    bool is_changed(const ggml_tensor * t) {
        if (changed.empty()) {
            for (const int i : work) {
                changed.insert(neuron_root_of(cgraph->nodes[i]));
            }
        }
        return changed.count(neuron_root_of(t)) != 0;
    }

    bool find_exact(size_t first, neuron_group & group) {
        const auto * patterns = kernels.groups.beginning_with(tokens[first]);
        if (!patterns) {
            return false;
        }
        for (const neuron_group_pattern & pattern : *patterns) {
            const size_t n = pattern.tokens.size();
            if (!begins(first, hashes, pattern.tokens)) {
                continue;
            }
            bool same = false;
            // kernels for all of a cache need no condition
            if (find_either(first, n, group, false, [&](const std::vector<uint64_t> & words) {
                    same = same || (!words.empty() &&
                                    pattern.wirings.count(neuron_wiring_hash(words.data(), words.size())) != 0);
                    return use_exact(pattern, words, group);
                })) {
                return true;
            }
            note(first, n, same ? NEURON_UNGROUPED_RESULT : NEURON_UNGROUPED_WIRING);
        }
        return false;
    }

    bool use_exact(const neuron_group_pattern & pattern, const std::vector<uint64_t> & words, neuron_group & group) {
        neuron_kernel kernel = kernels.find_graph(words);
        if (!kernel) {
            kernel = find_spread(pattern, words, group);
        }
        if (!kernel || !find_row_conditions(kernel, group)) {
            return false;
        }
        neuron_group_kernel own{ nullptr, 0, kernel.bundle, kernel.number, 0 };
        own.key = neuron_kernels_key(kernel.bundle->handle, kernel.number, &own.n_words);
        group.hidden_conditions.clear();
        if (!may_leave_out(own, group)) {
            return false;
        }
        add_hidden_conditions(own, {}, group);
        group.pieces.push_back({ kernel });
        group.fused = true;
        return true;
    }

    // Finds a kernel of a pattern that has several slots where the group has one tensor.
    neuron_kernel find_spread(const neuron_group_pattern &  pattern,
                              const std::vector<uint64_t> & words,
                              neuron_group &                group) {
        for (const neuron_group_kernel & kernel : pattern.kernels) {
            const std::vector<uint64_t> own = words.empty() ? words : spread(kernel, words, group);
            if (!own.empty() && std::equal(own.begin(), own.end(), kernel.key)) {
                return { kernel.bundle, kernel.number };
            }
        }
        return {};
    }

    const ggml_cgraph *          cgraph;
    const neuron_kernel_store &  kernels;
    const bool                   watched;
    const neuron_unmet           unmet;
    const neuron_streams * const streams;  // whose graph it is; NULL: ggml's
    neuron_variant               variant;  // of the keys at hand
    std::vector<int>             work;     // nodes that have to be computed
    std::vector<uint64_t>        tokens;
    neuron_token_hashes          hashes;
    std::vector<uint64_t>        loose;  // tokens without extents
    neuron_token_hashes          loose_hashes;
    std::unordered_map<const neuron_group_family *, std::array<choice, neuron_variant::N>> chosen;  // by variant
    std::unordered_set<const ggml_tensor *> changed;  // roots of what is computed
    std::vector<neuron_ungrouped>           reasons;
};

}  // namespace

// Adds the nodes of ggml's that are not all in one group of a graph of streams to those that are left whole. Returns whether there are any.
static bool leave_whole(const neuron_streams & streams, const neuron_groups & groups, std::unordered_set<int> & whole) {
    std::unordered_set<int> together;
    for (const neuron_group & group : groups.groups) {
        std::unordered_map<int, int> n_parts;
        for (const int i : group.nodes) {
            n_parts[streams.original(i)]++;
        }
        for (const auto & [node, n] : n_parts) {
            if (n == streams.n_parts(node)) {
                together.insert(node);
            }
        }
    }
    const size_t before = whole.size();
    for (int i = 0; i < streams.graph()->n_nodes; i++) {
        const int node = streams.original(i);
        if (streams.n_parts(node) > 1 && !together.count(node)) {
            whole.insert(node);
        }
    }
    return whole.size() != before;
}

// Finds the groups of a graph whose attention is of several sequences with a cache each: those that compute it as it is, and those of
// which each has the caches apart. Sets `found` to these, or leaves it as it is where there are none.
static void find_with_streams(const ggml_cgraph *         cgraph,
                              const neuron_kernel_store & kernels,
                              neuron_unmet                unmet,
                              neuron_groups &             found) {
    std::unordered_set<int> whole;
    for (const neuron_group & group : found.groups) {
        whole.insert(group.nodes.begin(), group.nodes.end());
    }
    while (true) {
        const neuron_streams streams(cgraph, whole);
        if (streams.empty()) {
            return;
        }
        neuron_groups groups = group_search(streams.graph(), kernels, false, unmet, &streams).run();
        if (leave_whole(streams, groups, whole)) {
            continue;
        }
        for (neuron_group & group : groups.groups) {
            streams.restore(group);
        }
        for (auto & [node, reason] : groups.outside) {
            node = streams.original(node);
        }
        found = std::move(groups);
        return;
    }
}

neuron_groups neuron_find_groups(const ggml_cgraph *         cgraph,
                                 const neuron_kernel_store & kernels,
                                 bool                        watched,
                                 neuron_unmet                unmet) {
    if (kernels.groups.empty()) {
        return {};
    }
    neuron_groups found = group_search(cgraph, kernels, watched, unmet).run();
    if (!watched && !unmet.rows && !kernels.is_exact_only() &&
        std::any_of(cgraph->nodes, cgraph->nodes + cgraph->n_nodes, neuron_has_streams)) {
        find_with_streams(cgraph, kernels, unmet, found);
    }
    return found;
}
