// The price of a launch: a target's figures for the choice of pieces (tools/kernelgen/dispatch/chips.json,
// GGML_NEURON_COSTS).

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct neuron_costs {
    double                                  launch_us = 0;  // fixed time of a launch
    double                                  gb_per_s  = 0;  // rate of reading memory
    std::vector<std::pair<int64_t, double>> rows_ms;        // time of a layer by its number of rows, ascending

    // Returns the figures that `use` has set; before its first call, the figures of the table's first target.
    static const neuron_costs & get();

    // Sets the figures of GGML_NEURON_COSTS (docs/reference/kernel-selection.md), and the others from the table's row of
    // the target, or its first row. Reports a wrong value of the variable. Call it before devices are used.
    //
    // lnc     physical cores per logical core
    // queued  whether launches are queued; otherwise the host waits for each
    static void use(const std::string & target, uint32_t lnc, bool queued);

    // Returns the time of this many rows divided by the time of few rows, which the rate of memory bounds.
    double factor(int64_t rows) const;

    // Returns the microseconds of a launch.
    //
    // whole  bytes that are read for any number of tokens: weights
    // row    bytes that are read and written per token
    double launch(double whole, double row, int64_t tokens) const {
        return launch_us + (whole * factor(tokens) + row * (double) tokens) / (gb_per_s * 1e3);
    }
};
