#include "select/costs.h"

#include "../../bundle/src/error.h"
#include "../../bundle/src/json.h"
#include "report/environment.h"
#include "report/log.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "select/costs.inc"

constexpr int MAX_ROWS = 1000000000;

static double positive(const nk::json & number, const char * name) {
    const double value = std::strtod(number.text.c_str(), nullptr);
    if (number.kind != nk::json::NUMBER || !(value > 0) || !std::isfinite(value)) {
        nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "byte %zu: %s is not a number above 0", number.at, name);
    }
    return value;
}

std::string neuron_read_costs(const std::string & text, bool queued, neuron_costs & costs, bool & one_launch_us) {
    try {
        const nk::json read = nk::json_read(text);
        neuron_costs   found;
        one_launch_us = true;
        for (const auto & [name, launch] : read.members) {
            one_launch_us &= name != "launch_us" || launch.kind != nk::json::OBJECT;
        }
        if (one_launch_us) {
            found.launch_us = positive(read.get("launch_us", nk::json::NUMBER), "launch_us");
        } else {
            const nk::json & launch    = read.get("launch_us", nk::json::OBJECT);
            const double     queued_us = positive(launch.get("queued", nk::json::NUMBER), "queued");
            const double     waited_us = positive(launch.get("waited", nk::json::NUMBER), "waited");
            found.launch_us            = queued ? queued_us : waited_us;
        }
        found.gb_per_s = positive(read.get("gb_per_s", nk::json::NUMBER), "gb_per_s");
        for (const nk::json & row : read.get("rows_ms", nk::json::ARRAY).items) {
            if (row.kind != nk::json::ARRAY || row.items.size() != 2) {
                nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "byte %zu: rows_ms holds pairs of rows and milliseconds",
                         row.at);
            }
            const double count = positive(row.items[0], "a number of rows");
            if (count > MAX_ROWS || count != std::floor(count)) {
                nk::fail(NEURON_KERNELS_ERROR_CORRUPT, "byte %zu: rows are a whole number from 1 to %d",
                         row.items[0].at, MAX_ROWS);
            }
            const auto rows = (int64_t) count;
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

// Returns the figures of a target, and its name and LNC for messages.
static std::pair<neuron_costs, std::string> of_target(const std::string & target, uint32_t lnc, bool queued) {
    const auto * found = &NEURON_COSTS[0];
    for (const auto & row : NEURON_COSTS) {
        if (target == row.target && lnc == row.lnc) {
            found = &row;
        }
    }
    neuron_costs costs;
    costs.launch_us = queued ? found->queued_us : found->waited_us;
    costs.gb_per_s  = found->gb_per_s;
    costs.rows_ms   = found->rows_ms;
    return { costs, std::string(found->target) + " with LNC " + std::to_string(found->lnc) };
}

static neuron_costs & in_use() {
    static neuron_costs costs = of_target("", 0, true).first;
    return costs;
}

const neuron_costs & neuron_costs::get() {
    return in_use();
}

void neuron_costs::use(const std::string & target, uint32_t lnc, bool queued) {
    auto [found, whose]    = of_target(target, lnc, queued);
    const std::string path = neuron_variable("GGML_NEURON_COSTS");
    if (!path.empty()) {
        std::string text;
        bool        one_launch_us = false;
        std::string wrong         = neuron_read_small_file(path, text);
        if (wrong.empty()) {
            wrong = neuron_read_costs(text, queued, found, one_launch_us);
        }
        if (wrong.empty()) {
            whose = path;
            if (one_launch_us) {
                NEURON_WARN("GGML_NEURON_COSTS: %s: its launch_us counts both for queued launches and for launches "
                            "that the host waits for\n"
                            "to tell them apart: {\"queued\": ..., \"waited\": ...}\n",
                            path.c_str());
            }
        } else {
            NEURON_ERROR("GGML_NEURON_COSTS: %s: %s; kernels are chosen by the built-in costs\n", path.c_str(),
                         wrong.c_str());
        }
    }
    NEURON_LOG("costs of kernels are those of %s: a launch that is %s takes %g us, memory is read at %g GB/s\n",
               whose.c_str(), queued ? "queued" : "waited for", found.launch_us, found.gb_per_s);
    in_use() = found;
}
