#include "select/group_choice.h"

#include "../../bundle/src/graph_key.h"
#include "select/costs.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

const neuron_group_option * neuron_group_choice::option_for(int64_t n) const {
    const auto found =
        std::find_if(options.begin(), options.end(), [n](const auto & o) { return o.cut.n_kernel == n; });
    return found == options.end() ? nullptr : &*found;
}

// Returns what a fit has of the cache: kernels for pieces of one group have it in common.
static std::vector<size_t> cells_of(const neuron_group_fit & fit) {
    std::vector<size_t> cells;
    cells.reserve(fit.slots.size());
    for (const neuron_group_room & room : fit.slots) {
        cells.push_back(room.kind == neuron_group_room::MASK    ? (size_t) room.columns
                        : room.kind == neuron_group_room::CELLS ? room.size
                                                                : 0);
    }
    return cells;
}

// Returns where the first node of a group has more elements than a kernel's: both numbers, or 0s.
static std::pair<int64_t, int64_t> more_than(const uint64_t * group, const uint64_t * kernel) {
    const uint64_t * a = nk::read_graph_node(nk::first_graph_node(group)).tensor;
    const uint64_t * b = nk::read_graph_node(nk::first_graph_node(kernel)).tensor;
    for (int i = 1; i <= 4; i++) {
        if (a[i] > b[i]) {
            return { (int64_t) a[i], (int64_t) b[i] };
        }
    }
    return {};
}

std::optional<neuron_group_option> neuron_try_kernel(const neuron_group_kernel & kernel,
                                                     const uint64_t *            words,
                                                     bool                        whole) {
    neuron_group_option option;
    option.kernel = &kernel;
    option.whole  = whole;
    if (!(whole ? neuron_fit_group(words, kernel.key, kernel.n_words, option.cut.fit)
                : neuron_cut_group(words, kernel.key, kernel.n_words, option.cut))) {
        return std::nullopt;
    }
    option.cells = cells_of(option.cut.fit);
    return option;
}

// Returns the tokens of a kernel that computes all of a group, by what it has more of slots that are cut.
static int64_t tokens_of(const neuron_group_fit & whole, const neuron_group_cut & cut, const uint64_t * words) {
    for (size_t i = 0; i < whole.slots.size(); i++) {
        if (whole.slots[i].kind == neuron_group_room::ROWS && cut.slot_rows[i]) {
            return cut.n + (int64_t) ((whole.slots[i].size - (size_t) words[2 + i]) / cut.slot_rows[i]);
        }
    }
    return cut.n;
}

// Returns what a launch of an option's kernel takes; `rows` says what is cut.
static double launch_of(const neuron_group_option & option, const neuron_group_cut & rows, int64_t n) {
    double whole = 0;
    double row   = (double) std::accumulate(rows.result_rows.begin(), rows.result_rows.end(), (size_t) 0);
    for (size_t i = 0; i < rows.slot_rows.size(); i++) {
        row += (double) rows.slot_rows[i];
        whole += rows.slot_rows[i] ? 0.0 : (double) option.cut.fit.slots[i].size;
    }
    return neuron_costs::get().launch(whole, row, n);
}

// Returns whether the kernels of two options may compute pieces of one group.
static bool go_together(const neuron_group_option & a, const neuron_group_option & b) {
    return a.cells == b.cells && a.cut.n == b.cut.n && a.cut.slot_rows == b.cut.slot_rows &&
           a.cut.result_rows == b.cut.result_rows;
}

namespace {

// Chooses pieces among kernels for fewer tokens.
class piece_choice {
  public:
    piece_choice(const uint64_t * words, const neuron_group_attempt & attempt, neuron_group_choice & choice) :
        words(words), attempt(attempt), choice(choice) {}

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
        const neuron_group_option longest = choice.options.front();
        std::vector<int64_t>      counts;
        std::vector<double>       costs;
        for (const auto & entry : kernels) {
            counts.push_back(entry.first * longest.cut.n / more);
            costs.push_back(launch_of(longest, longest.cut, counts.back()));
        }
        choice.ranges = neuron_choose_pieces(longest.cut.n, std::move(counts), std::move(costs), true,
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
        const neuron_group_option longest = choice.options.front();
        if (choice.option_for(n)) {
            return true;
        }
        for (const neuron_group_kernel * kernel : kernels.at(n * more / longest.cut.n)) {
            auto option = attempt(*kernel, false);
            if (option && option->cut.n_kernel == n && go_together(*option, longest)) {
                choice.options.push_back(std::move(*option));
                return true;
            }
        }
        return false;
    }

    double launches_of(const std::vector<neuron_range> & ranges) const {
        double cost = 0;
        for (const neuron_range & range : ranges) {
            cost += launch_of(*choice.option_for(range.n), choice.options.front().cut, range.n);
        }
        return cost;
    }

    double launch_of_whole() const {
        const neuron_group_cut & rows = choice.options.front().cut;
        return launch_of(*choice.whole, rows, tokens_of(choice.whole->cut.fit, rows, words));
    }

    const uint64_t *             words;
    const neuron_group_attempt & attempt;
    neuron_group_choice &        choice;
    int64_t                      more = 0;                                // of the group, of what kernels have fewer

    std::map<int64_t, std::vector<const neuron_group_kernel *>> kernels;  // by what they have of it
};

}  // namespace

neuron_group_choice neuron_choose_kernels(const std::vector<const neuron_group_kernel *> & kernels,
                                          const uint64_t *                                 words,
                                          const neuron_group_attempt &                     attempt) {
    neuron_group_choice choice;
    piece_choice        pieces(words, attempt, choice);
    for (const neuron_group_kernel * kernel : kernels) {
        const auto lengths = more_than(words, kernel->key);
        if (lengths.first) {
            pieces.add(*kernel, lengths);
        } else if (!choice.whole) {
            choice.whole = attempt(*kernel, true);
        }
    }
    pieces.choose();
    return choice;
}
