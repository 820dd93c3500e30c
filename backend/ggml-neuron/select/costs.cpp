#include "select/costs.h"

#include "report/environment.h"
#include "report/log.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "select/costs.inc"

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

using target_costs = std::remove_const_t<std::remove_reference_t<decltype(NEURON_COSTS[0])>>;

// Replaces figures by those of a text such as "queued_us=15,gb_per_s=227". Returns whether it is such a text.
static bool read_figures(const std::string & text, target_costs & costs) {
    std::istringstream items(text);
    for (std::string item; std::getline(items, item, ',');) {
        const size_t      equals = item.find('=');
        const std::string name   = item.substr(0, equals);
        double *          figure = name == "queued_us"   ? &costs.queued_us
                                   : name == "waited_us" ? &costs.waited_us
                                   : name == "gb_per_s"  ? &costs.gb_per_s
                                                         : nullptr;
        if (!figure || equals == std::string::npos) {
            return false;
        }
        const char * number = item.c_str() + equals + 1;
        char *       end    = nullptr;
        *figure             = strtod(number, &end);
        if (end == number || *end || !(*figure > 0) || !std::isfinite(*figure)) {
            return false;
        }
    }
    return true;
}

static neuron_costs & in_use() {
    static neuron_costs costs = { NEURON_COSTS[0].queued_us, NEURON_COSTS[0].gb_per_s, NEURON_COSTS[0].rows_ms };
    return costs;
}

const neuron_costs & neuron_costs::get() {
    return in_use();
}

void neuron_costs::use(const std::string & target, uint32_t lnc, bool queued) {
    target_costs costs = NEURON_COSTS[0];
    for (const target_costs & row : NEURON_COSTS) {
        if (target == row.target && lnc == row.lnc) {
            costs = row;
        }
    }
    std::string       whose = std::string(costs.target) + " with LNC " + std::to_string(costs.lnc);
    const std::string text  = neuron_variable("GGML_NEURON_COSTS");
    if (target_costs replaced = costs; !read_figures(text, replaced)) {
        NEURON_ERROR(
            "GGML_NEURON_COSTS is numbers above 0, such as queued_us=15,waited_us=140,gb_per_s=227, not '%s'; using "
            "those of %s\n",
            text.c_str(), whose.c_str());
    } else if (!text.empty()) {
        costs = replaced;
        whose += " and GGML_NEURON_COSTS";
    }
    in_use() = { queued ? costs.queued_us : costs.waited_us, costs.gb_per_s, costs.rows_ms };
    NEURON_LOG("costs of kernels are those of %s: a launch that is %s takes %g us, memory is read at %g GB/s\n",
               whose.c_str(), queued ? "queued" : "waited for", in_use().launch_us, in_use().gb_per_s);
}
