#include "select/costs.h"

#include "../../bundle/src/error.h"
#include "../../bundle/src/json.h"
#include "report/environment.h"
#include "report/log.h"

#include <cmath>
#include <cstdlib>

#include "select/costs.inc"

static double positive(const nk::json & number, const char * name) {
    const double value = std::strtod(number.text.c_str(), nullptr);
    if (number.kind != nk::json::NUMBER || !(value > 0) || !std::isfinite(value)) {
        nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "byte %zu: %s is not a number above 0", number.at, name);
    }
    return value;
}

std::string neuron_read_costs(const std::string & text, neuron_costs & costs) {
    try {
        const nk::json read = nk::json_read(text);
        neuron_costs   found;
        found.launch_us = positive(read.get("launch_us", nk::json::NUMBER), "launch_us");
        found.gb_per_s  = positive(read.get("gb_per_s", nk::json::NUMBER), "gb_per_s");
        for (const nk::json & row : read.get("rows_ms", nk::json::ARRAY).items) {
            if (row.kind != nk::json::ARRAY || row.items.size() != 2) {
                nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "byte %zu: rows_ms holds pairs of rows and milliseconds",
                         row.at);
            }
            const auto rows = (int64_t) positive(row.items[0], "a number of rows");
            if (!found.rows_ms.empty() && rows <= found.rows_ms.back().first) {
                nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "byte %zu: the rows of rows_ms do not ascend", row.at);
            }
            found.rows_ms.emplace_back(rows, positive(row.items[1], "milliseconds"));
        }
        if (found.rows_ms.empty()) {
            nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "rows_ms is empty");
        }
        costs = found;
        return "";
    } catch (const nk::error & error) {
        return error.message;
    }
}

double neuron_costs::factor(int64_t rows) const {
    const auto & first = rows_ms.front();
    if (rows <= first.first) {
        return 1;
    }
    for (size_t i = 1; i < rows_ms.size(); i++) {
        const auto & a = rows_ms[i - 1];
        const auto & b = rows_ms[i];
        if (rows <= b.first) {
            return (a.second + (b.second - a.second) * (double) (rows - a.first) / (double) (b.first - a.first)) /
                   first.second;
        }
    }
    const auto & last = rows_ms.back();
    return last.second * (double) rows / (double) last.first / first.second;
}

const neuron_costs & neuron_costs::get() {
    static const neuron_costs costs = [] {
        neuron_costs found;
        neuron_read_costs(COSTS, found);
        const std::string path = neuron_variable("GGML_NEURON_COSTS");
        if (!path.empty()) {
            std::string text;
            std::string wrong = neuron_read_small_file(path, text);
            if (wrong.empty()) {
                wrong = neuron_read_costs(text, found);
            }
            if (!wrong.empty()) {
                NEURON_ERROR("GGML_NEURON_COSTS: %s: %s; kernels are chosen by the figures that this was built with\n",
                             path.c_str(), wrong.c_str());
            }
        }
        return found;
    }();
    return costs;
}
