// What a launch takes: figures of a target that choose among pieces (tools/kernelgen/dispatch/chips.json, GGML_NEURON_COSTS).

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct neuron_costs {
    double                                  launch_us = 0;  // what every launch takes, whatever it computes
    double                                  gb_per_s  = 0;  // at which memory is read
    std::vector<std::pair<int64_t, double>> rows_ms;        // time of a layer by its rows, ascending

    // Returns the figures that `use` took; before that those of the table's first target.
    static const neuron_costs & get();

    // Takes the figures of the file that GGML_NEURON_COSTS names, else those of a target; of one that is not in the table those of its
    // first. A file that can't be read is reported. To be called before devices are used.
    //
    // lnc     physical cores of a logical one
    // queued  whether launches are queued, or each is waited for
    static void use(const std::string & target, uint32_t lnc, bool queued);

    // Returns how many times as long as few rows this many take where memory bounds few.
    double factor(int64_t rows) const;

    // Returns microseconds for a launch.
    //
    // whole  bytes that are read for any number of tokens: weights
    // row    bytes that are read and written for each token
    double launch(double whole, double row, int64_t tokens) const {
        return launch_us + (whole * factor(tokens) + row * (double) tokens) / (gb_per_s * 1e3);
    }
};

// Reads a user's text (docs/reference/kernel-selection.md). Returns "" and sets `costs`, or returns what is wrong with it.
//
// one_launch_us  set to whether it has one `launch_us` for launches that are queued and that are waited for
std::string neuron_read_costs(const std::string & text, bool queued, neuron_costs & costs, bool & one_launch_us);
