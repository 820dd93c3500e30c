// What a launch takes: measurements that choose among pieces (tools/kernelgen/dispatch/costs.json, GGML_NEURON_COSTS).

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct neuron_costs {
    double                                  launch_us = 0;  // what every launch takes, whatever it computes
    double                                  gb_per_s  = 0;  // at which memory is read
    std::vector<std::pair<int64_t, double>> rows_ms;        // time of a layer by its rows, ascending

    // Returns the figures of costs.json, or of the file that GGML_NEURON_COSTS names. A file that can't be read is reported.
    static const neuron_costs & get();

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

// Reads a text like that of tools/kernelgen/dispatch/costs.json. Returns "" and sets `costs`, or returns what is wrong with it.
std::string neuron_read_costs(const std::string & text, neuron_costs & costs);
