#include "group_choice.h"

#include "../bundle/src/graph_key.h"
#include "costs.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

const neuron_group_option & neuron_group_choice::option_for(int64_t n) const {
    return *std::find_if(options.begin(), options.end(), [n](const auto & o) { return o.cut.n_kernel == n; });
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

// Compares the extents of the first nodes: -1 when the kernel's are smaller somewhere, 1 when they are larger, 0 when they tell nothing.
static int compare_first(const uint64_t * group, const uint64_t * kernel) {
    const uint64_t * a      = nk::read_graph_node(nk::first_graph_node(group)).tensor;
    const uint64_t * b      = nk::read_graph_node(nk::first_graph_node(kernel)).tensor;
    int              result = 0;
    for (int i = 1; i <= 4; i++) {
        result = a[i] > b[i] ? -1 : a[i] < b[i] && result == 0 ? 1 : result;
    }
    return result;
}

std::optional<neuron_group_option> neuron_try_kernel(const neuron_group_kernel & kernel,
                                                     const uint64_t *            words,
                                                     bool                        whole) {
    neuron_group_option option;
    option.kernel   = &kernel;
    const int first = compare_first(words, kernel.key);
    option.whole    = whole && first >= 0 && neuron_fit_group(words, kernel.key, kernel.n_words, option.cut.fit);
    if (!option.whole && (first > 0 || !neuron_cut_group(words, kernel.key, kernel.n_words, option.cut))) {
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

// Chooses pieces among kernels for as many cells; returns what they take.
static double choose_among(const std::vector<const neuron_group_option *> & options,
                           const uint64_t *                                 words,
                           const neuron_group_cut &                         rows,
                           std::vector<neuron_range> &                      ranges) {
    std::vector<std::pair<int64_t, double>> launches;
    launches.reserve(options.size());
    for (const neuron_group_option * option : options) {
        const int64_t n = option->whole ? tokens_of(option->cut.fit, rows, words) : option->cut.n_kernel;
        launches.emplace_back(n, launch_of(*option, rows, n));
    }
    std::sort(launches.begin(), launches.end());
    std::vector<int64_t> counts;
    std::vector<double>  costs;
    for (const auto & [n, cost] : launches) {
        counts.push_back(n);
        costs.push_back(cost);
    }
    ranges      = neuron_choose_pieces(rows.n, counts, costs, true);
    double cost = ranges.empty() ? std::numeric_limits<double>::infinity() : 0;
    for (const neuron_range & range : ranges) {
        cost += costs[(size_t) (std::lower_bound(counts.begin(), counts.end(), range.n) - counts.begin())];
    }
    return cost;
}

void neuron_choose_ranges(const uint64_t * words, neuron_group_choice & choice) {
    if (choice.options.empty()) {
        return;
    }
    const neuron_group_cut                   rows = choice.options.front().cut;
    double                                   best = std::numeric_limits<double>::infinity();
    std::vector<size_t>                      best_cells;
    std::vector<neuron_range>                ranges;
    std::vector<const neuron_group_option *> alone;
    if (choice.whole) {
        alone = { &*choice.whole };
        best  = choose_among(alone, words, rows, ranges);
    }
    for (const neuron_group_option & first : choice.options) {
        std::vector<const neuron_group_option *> same;
        for (const neuron_group_option & option : choice.options) {
            if (option.cells == first.cells) {
                same.push_back(&option);
            }
        }
        if (same.front() != &first) {
            continue;  // these were seen
        }
        const double cost = choose_among(same, words, rows, ranges);
        if (cost < best) {
            best          = cost;
            best_cells    = first.cells;
            choice.ranges = ranges;
        }
    }
    auto & all = choice.options;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const auto & o) { return o.cells != best_cells; }), all.end());
}
