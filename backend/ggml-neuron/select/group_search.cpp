#include "select/group_search.h"

#include "select/group_choice.h"
#include "select/group_conditions.h"
#include "select/group_index.h"
#include "select/group_key.h"
#include "select/key_nodes.h"
#include "select/numbers.h"
#include "select/tensors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

class group_search {
  public:
    group_search(const ggml_cgraph *         cgraph,
                 const neuron_kernel_store & kernels,
                 bool                        watched,
                 neuron_unmet                unmet,
                 const neuron_streams *      streams) :
        cgraph(cgraph), kernels(kernels), watched(watched), unmet(unmet), streams(streams),
        conditions(cgraph, work, unmet, streams) {
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

    // Returns whether the nodes from `first` on have the tokens of a pattern or a family. Notes when the graph ends
    // before the tokens do.
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

    // Returns the key of n nodes from `first` on, and makes them the group.
    std::vector<uint64_t> take(size_t first, size_t n, neuron_group & group) {
        const auto begin = work.begin() + (std::ptrdiff_t) first;
        group.nodes.assign(begin, begin + (std::ptrdiff_t) n);
        return neuron_group_words(cgraph, watched, group, nullptr, variant, streams);
    }

    // Finds the group that begins with a node: the longest one with a kernel of its exact lengths, unless kernels for
    // other numbers of tokens, or for a longer cache, compute more nodes in one launch. Without an exact kernel, finds
    // the longest group that such kernels compute.
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

    // Adds a slot with the nodes' numbers to a group whose kernels are for any numbers.
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

    // Calls `find` with the keys of n nodes from `first` on, which become the group, until it returns true. The key
    // with the nodes' own numbers comes before the key for any numbers. The key of causal attention, if there is such a
    // kernel, comes before the others. The key of the first rows of caches comes before or after the key of all rows.
    //
    // begin  whether the key of the first rows comes first
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

    // Computes the tokens without extents on first use.
    void loosen() {
        if (loose.empty()) {
            for (const int i : work) {
                loose.push_back(neuron_token_of(cgraph->nodes[i], neuron_token_kind::WITHOUT_EXTENTS));
            }
            loose_hashes = neuron_token_hashes(loose);
        }
    }

    // least  groups of up to this many nodes are not searched
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
            // without a kernel of this length, the kernels for first rows are the shorter ones
            if (find_either(first, n, group, true, [&](std::vector<uint64_t> words) {
                    return !words.empty() && choose(family, std::move(words), group);
                })) {
                return true;
            }
            note(first, n, NEURON_UNGROUPED_LENGTH);
        }
        return false;
    }

    // Gives the group a slot for each of a kernel's slots: a single tensor of the graph may be several tensors in the
    // kernel. Returns the group's key, or none when the kernel's slots differ.
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

    // The last choice for a family, and its inputs.
    struct choice {
        std::vector<uint64_t>       words;
        std::vector<size_t>         room;              // bytes from the beginning of each slot to the end of its tensor
        const neuron_group_kernel * sample = nullptr;  // the group gets its slots; NULL: nothing was found
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
        if (last.words != words || last.room != room) {  // else the group is a layer like the last one
            last = { std::move(words), std::move(room), nullptr, {} };
            search(family, group, last);
        }
        if (!last.sample ||
            (last.sample->n_words != last.words.size() && spread(*last.sample, last.words, group).empty())) {
            return false;
        }
        return use(last, group);
    }

    // Searches the kernels with equal numbers of slots together, beginning with those that have a slot for each tensor.
    void search(const neuron_group_family & family, const neuron_group & group, choice & c) {
        for (const neuron_group_kernel & first : family.kernels) {
            const bool   seen  = std::any_of(family.kernels.data(), &first,
                                             [&](const neuron_group_kernel & k) { return k.n_words == first.n_words; });
            neuron_group other = group;
            const std::vector<uint64_t> own = seen ? std::vector<uint64_t>() : words_for(first, c.words, other);
            if (own.empty()) {
                continue;
            }
            neuron_group_choice found = choose_like(family, first, own, group, c.words, other);
            if (found.whole || !found.ranges.empty()) {
                c.sample = &first;
                c.found  = std::move(found);
                return;
            }
        }
    }

    // Chooses among the kernels of a family that have as many slots as `first`.
    //
    // own    the group's key with the slots of `first`
    // words  the group's key with its own slots
    // other  the group with the slots of `first`; it receives the rooms of kernels that are tried
    neuron_group_choice choose_like(const neuron_group_family &   family,
                                    const neuron_group_kernel &   first,
                                    const std::vector<uint64_t> & own,
                                    const neuron_group &          group,
                                    const std::vector<uint64_t> & words,
                                    neuron_group &                other) {
        std::vector<const neuron_group_kernel *> all;
        for (const neuron_group_kernel & kernel : family.kernels) {
            if (kernel.n_words == first.n_words) {
                all.push_back(&kernel);
            }
        }
        const neuron_key key(own.data(), own.size());
        const auto attempt = [&](const neuron_group_kernel & kernel, bool whole) -> std::optional<neuron_group_option> {
            neuron_group again = group;
            if (&kernel != &first && kernel.n_words != words.size() && spread(kernel, words, again) != own) {
                return std::nullopt;
            }
            auto option =
                conditions.may_leave_out(kernel, variant, group) ? neuron_try_kernel(kernel, key, whole) : std::nullopt;
            if (!option) {
                return std::nullopt;
            }
            make_room(option->fit, other);
            return other.has_room() ? std::move(option) : std::nullopt;
        };
        return neuron_choose_kernels(all, key, attempt);
    }

    std::vector<uint64_t> words_for(const neuron_group_kernel &   kernel,
                                    const std::vector<uint64_t> & words,
                                    neuron_group &                group) {
        return kernel.n_words == words.size() ? words : spread(kernel, words, group);
    }

    static neuron_kernel kernel_of(const neuron_group_option & option) {
        return { option.kernel->bundle, option.kernel->number };
    }

    // Sets the rooms of a group's slots for a kernel.
    void make_room(const neuron_group_fit & fit, neuron_group & group) const {
        for (size_t i = 0; i < group.slots.size(); i++) {
            neuron_group_slot &       slot = group.slots[i];
            const neuron_group_room & room = fit.slots[i];
            slot.room                      = room;
            slot.mask = room.kind == neuron_group_room::WIDER ? cgraph->nodes[group.nodes[room.node]]->src[room.source]
                                                              : nullptr;
        }
    }

    // Computes a group by the choice: in pieces if that is better and possible, else whole.
    bool use(const choice & c, neuron_group & group) {
        const neuron_group_choice & found = c.found;
        if (!found.ranges.empty()) {
            if (conditions.find_causal(found.options.front().fit, found.ranges, group)) {
                return use_pieces(found, group);
            }
            note((size_t) (std::lower_bound(work.begin(), work.end(), group.first()) - work.begin()),
                 group.nodes.size(), NEURON_UNGROUPED_ORDER);
        }
        return found.whole && use_whole(*found.whole, group);
    }

    // Sets the memory that all kernels of a group need. Returns false when their conditions are unmet.
    bool take_room(const neuron_group_option & option, neuron_group & group) {
        if (!conditions.find_rows(kernel_of(option), group) || !conditions.can_rename(option.fit, group)) {
            return false;
        }
        make_room(option.fit, group);
        group.hidden_conditions.clear();
        group.fused = group.other = true;
        return true;
    }

    bool use_whole(const neuron_group_option & option, neuron_group & group) {
        if (!take_room(option, group)) {
            return false;
        }
        group.causal_conditions.clear();
        conditions.add_hidden(*option.kernel, variant, {}, group);
        for (size_t i = 0; i < group.results.size(); i++) {
            group.results[i].size   = option.fit.results[i].size;
            group.results[i].blocks = option.fit.results[i].blocks;
        }
        group.pieces.push_back({ kernel_of(option) });
        group.padding = option.fit.padding;
        return true;
    }

    bool use_pieces(const neuron_group_choice & found, neuron_group & group) {
        const neuron_group_fit & fit = found.options.front().fit;
        if (!take_room(found.options.front(), group)) {
            return false;
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
        for (const neuron_range & range : found.ranges) {
            const neuron_group_option & option = *found.option_for(range.n);
            conditions.add_hidden(*option.kernel, variant, range, group);
            group.pieces.push_back({ kernel_of(option), range });
            group.padding += range.n;
        }
        return true;
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
            // kernels for a whole cache need no condition
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
        if (!kernel || !conditions.find_rows(kernel, group)) {
            return false;
        }
        neuron_group_kernel own{ nullptr, 0, kernel.bundle, kernel.number, 0 };
        own.key = neuron_kernels_key(kernel.bundle->handle, kernel.number, &own.n_words);
        group.hidden_conditions.clear();
        if (!conditions.may_leave_out(own, variant, group)) {
            return false;
        }
        conditions.add_hidden(own, variant, {}, group);
        group.pieces.push_back({ kernel });
        group.fused = true;
        return true;
    }

    // Finds a kernel of a pattern that has several slots for one tensor of the group.
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
    const neuron_streams * const streams;  // the owner of the graph; NULL: the graph is ggml's
    neuron_variant               variant;  // of the current keys
    std::vector<int>             work;     // nodes to compute
    std::vector<uint64_t>        tokens;
    neuron_token_hashes          hashes;
    std::vector<uint64_t>        loose;  // tokens without extents
    neuron_token_hashes          loose_hashes;
    std::unordered_map<const neuron_group_family *, std::array<choice, neuron_variant::N>> chosen;  // by variant
    neuron_group_conditions                                                                conditions;
    std::vector<neuron_ungrouped>                                                          reasons;
};

}  // namespace

neuron_groups neuron_search_groups(const ggml_cgraph *         cgraph,
                                   const neuron_kernel_store & kernels,
                                   bool                        watched,
                                   neuron_unmet                unmet,
                                   const neuron_streams *      streams) {
    return group_search(cgraph, kernels, watched, unmet, streams).run();
}
