#include "select/group_choice.h"

#include "select/costs.h"
#include "select/group_pieces.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

const neuron_group_option * neuron_group_choice::option_for(int64_t n) const {
    const auto found =
        std::find_if(options.begin(), options.end(), [n](const auto & o) { return o.fit.n_kernel == n; });
    return found == options.end() ? nullptr : &*found;
}

// Compares the first nodes of the group and the kernel. Returns the first pair of extents with a larger one in the
// group, or 0s.
static std::pair<int64_t, int64_t> more_than(const neuron_key & group, const uint64_t * kernel) {
    const uint64_t * a = group.nodes.front().tensor;
    const uint64_t * b = nk::read_graph_node(nk::first_graph_node(kernel)).tensor;
    for (int i = 1; i <= 4; i++) {
        if (a[i] > b[i]) {
            return { (int64_t) a[i], (int64_t) b[i] };
        }
    }
    return {};
}

std::optional<neuron_group_option> neuron_try_kernel(const neuron_group_kernel & kernel,
                                                     const neuron_key &          group,
                                                     bool                        whole) {
    const neuron_key    key(kernel.key, kernel.n_words);
    neuron_group_option option{ &kernel, {} };
    const auto          fits = whole ? neuron_fit_whole : neuron_fit_pieces;
    if (!group.is_wired_as(key) || !fits(group, key, option.fit)) {
        return std::nullopt;
    }
    return option;
}

// Returns the number of tokens of a kernel for the whole group, from its larger slots.
static int64_t tokens_of(const neuron_group_fit & whole, const neuron_group_fit & pieces, const neuron_key & group) {
    for (size_t i = 0; i < whole.slots.size(); i++) {
        if (whole.slots[i].kind == neuron_group_room::ROWS && pieces.slots[i].row) {
            return pieces.n + (int64_t) ((whole.slots[i].size - group.slot_size(i)) / pieces.slots[i].row);
        }
    }
    return pieces.n;
}

// Returns the price of a launch of a kernel; `pieces` states which slots are cut.
static double launch_of(const neuron_group_fit & fit, const neuron_group_fit & pieces, int64_t n) {
    double whole = 0;
    double row   = 0;
    for (const neuron_group_room & room : pieces.results) {
        row += (double) room.row;
    }
    for (size_t i = 0; i < pieces.slots.size(); i++) {
        row += (double) pieces.slots[i].row;
        whole += pieces.slots[i].row ? 0.0 : (double) fit.slots[i].size;
    }
    return neuron_costs::get().launch(whole, row, n);
}

// Returns whether two kernels may compute pieces of one group: they have the same rooms and the same length of the
// cache.
static bool go_together(const neuron_group_fit & a, const neuron_group_fit & b) {
    const auto same = [](const neuron_group_room & x, const neuron_group_room & y) {
        return x.kind == y.kind && x.wider.columns == y.wider.columns && x.row == y.row &&
               (x.kind != neuron_group_room::CELLS || x.size == y.size);
    };
    return a.n == b.n && std::equal(a.slots.begin(), a.slots.end(), b.slots.begin(), b.slots.end(), same) &&
           std::equal(a.results.begin(), a.results.end(), b.results.begin(), b.results.end(), same);
}

namespace {

// Chooses pieces among kernels for fewer tokens.
class piece_choice {
  public:
    piece_choice(const neuron_key & group, const neuron_group_attempt & attempt, neuron_group_choice & choice) :
        group(group), attempt(attempt), choice(choice) {}

    void add(const neuron_group_kernel & kernel, std::pair<int64_t, int64_t> lengths) {
        more = lengths.first;
        kernels[lengths.second].push_back(&kernel);
    }

    void choose() {
        while (!kernels.empty() && !find_longest()) {
            kernels.erase(std::prev(kernels.end()));
        }
        if (kernels.empty()) {
            return;
        }
        const neuron_group_fit longest = choice.options.front().fit;
        std::vector<int64_t>   counts;
        std::vector<double>    costs;
        for (const auto & entry : kernels) {
            if (entry.first * longest.n % more == 0) {  // else they have another number of rows per token
                counts.push_back(entry.first * longest.n / more);
                costs.push_back(launch_of(longest, longest, counts.back()));
            }
        }
        choice.ranges = neuron_choose_pieces(longest.n, std::move(counts), std::move(costs), true,
                                             [this](int64_t n) { return has_option(n); });
        if (choice.whole && !choice.ranges.empty() && launch_of_whole() <= launches_of(choice.ranges)) {
            choice.ranges.clear();
        }
    }

  private:
    // Finds the kernel for most tokens, and among these the one for the shortest cache.
    bool find_longest() {
        for (const neuron_group_kernel * kernel : kernels.rbegin()->second) {
            if (auto option = attempt(*kernel, false)) {
                choice.options.push_back(std::move(*option));
                return true;
            }
        }
        return false;
    }

    bool has_option(int64_t n) {
        const neuron_group_fit longest = choice.options.front().fit;
        if (choice.option_for(n)) {
            return true;
        }
        for (const neuron_group_kernel * kernel : kernels.at(n * more / longest.n)) {
            auto option = attempt(*kernel, false);
            if (option && option->fit.n_kernel == n && go_together(option->fit, longest)) {
                choice.options.push_back(std::move(*option));
                return true;
            }
        }
        return false;
    }

    double launches_of(const std::vector<neuron_range> & ranges) const {
        double cost = 0;
        for (const neuron_range & range : ranges) {
            cost += launch_of(choice.option_for(range.n)->fit, choice.options.front().fit, range.n);
        }
        return cost;
    }

    double launch_of_whole() const {
        const neuron_group_fit & pieces = choice.options.front().fit;
        return launch_of(choice.whole->fit, pieces, tokens_of(choice.whole->fit, pieces, group));
    }

    const neuron_key &           group;
    const neuron_group_attempt & attempt;
    neuron_group_choice &        choice;
    int64_t                      more = 0;                                // the group's extent where kernels have less

    std::map<int64_t, std::vector<const neuron_group_kernel *>> kernels;  // by their extent there
};

}  // namespace

neuron_group_choice neuron_choose_kernels(const std::vector<const neuron_group_kernel *> & kernels,
                                          const neuron_key &                               group,
                                          const neuron_group_attempt &                     attempt) {
    neuron_group_choice choice;
    piece_choice        pieces(group, attempt, choice);
    for (const neuron_group_kernel * kernel : kernels) {
        const auto lengths = more_than(group, kernel->key);
        if (lengths.first) {
            pieces.add(*kernel, lengths);
        } else if (!choice.whole) {
            choice.whole = attempt(*kernel, true);
        }
    }
    pieces.choose();
    return choice;
}
