#include "computing.h"

#include "../values.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "graph.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

ggml_backend_reg_t neurons;
ggml_backend_dev_t neuron;
ggml_backend_dev_t cpu;

// llama.cpp's test-fusion looks these functions up by name.
static void enable(bool groups) {
    const auto get =
        (void * (*)(ggml_backend_dev_t)) ggml_backend_reg_get_proc_address(neurons, "ggml_backend_fusion_get");
    const auto set =
        (void (*)(void *, bool)) ggml_backend_reg_get_proc_address(neurons, "ggml_backend_fusion_set_enabled");
    set(get(neuron), groups);
}

int launches() {
    const auto get =
        (void * (*)(ggml_backend_dev_t)) ggml_backend_reg_get_proc_address(neurons, "ggml_backend_fusion_get");
    const auto all = (int (*)(void *, const char **, uint64_t *, int)) ggml_backend_reg_get_proc_address(
        neurons, "ggml_backend_fusion_stats_get");
    const auto zero = (void (*)(void *)) ggml_backend_reg_get_proc_address(neurons, "ggml_backend_fusion_stats_reset");
    std::vector<uint64_t> counts((size_t) all(get(neuron), nullptr, nullptr, 0));
    all(get(neuron), nullptr, counts.data(), (int) counts.size());
    zero(get(neuron));
    int n = 0;
    for (const uint64_t count : counts) {
        n += (int) count;
    }
    return n;
}

static void fill(ggml_tensor * t, float seed) {
    const auto         n = (size_t) ggml_nelements(t);
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++) {
        values[i] = std::sin(seed + (float) i * 0.7f);
    }
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    } else if (t->type == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> halves(n);
        ggml_fp32_to_fp16_row(values.data(), halves.data(), (int64_t) n);
        ggml_backend_tensor_set(t, halves.data(), 0, ggml_nbytes(t));
    } else if (t->type == GGML_TYPE_I32) {
        std::vector<int32_t> rows(n);  // in reverse order
        for (size_t i = 0; i < n; i++) {
            rows[i] = (int32_t) (n - 1 - i);
        }
        ggml_backend_tensor_set(t, rows.data(), 0, ggml_nbytes(t));
    } else {
        std::vector<int64_t> rows(n);
        for (size_t i = 0; i < n; i++) {
            rows[i] = (int64_t) (2 * i + 1);
        }
        ggml_backend_tensor_set(t, rows.data(), 0, ggml_nbytes(t));
    }
}

static double nmse(const std::vector<float> & got, const std::vector<float> & wanted) {
    double error = 0;
    double size  = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        error += std::pow((double) got[i] - (double) wanted[i], 2.0);
        size += std::pow((double) wanted[i], 2.0);
    }
    return got.size() != wanted.size() || std::isnan(error) ? INFINITY : size > 0 ? error / size : error;
}

static outcome read_all(const graph & g) {
    outcome out;
    for (const ggml_tensor * node : g.work()) {
        if (node->flags & GGML_TENSOR_FLAG_OUTPUT) {
            out.push_back(read(node));
        }
    }
    for (const ggml_tensor * t : g.written) {
        if (t->buffer) {
            out.push_back(read(t));
        }
    }
    return out;
}

// Hides every cell, or every second one, from each token of a mask, beginning with a cell whose number grows with the
// token's number.
static void hide(ggml_tensor * mask, int64_t from, int64_t more, int64_t step) {
    std::vector<float> values = read(mask);
    for (int64_t t = 0; t < mask->ne[1]; t++) {
        for (int64_t cell = from + t * more; cell < mask->ne[0]; cell += step) {
            values[(size_t) (t * mask->ne[0] + cell)] = -INFINITY;
        }
    }
    std::vector<ggml_fp16_t> halves(values.size());
    ggml_fp32_to_fp16_row(values.data(), halves.data(), (int64_t) values.size());
    const bool half = mask->type == GGML_TYPE_F16;
    ggml_backend_tensor_set(mask, half ? (const void *) halves.data() : values.data(), 0, ggml_nbytes(mask));
}

// Hides later tokens' writes, in the cells that `fill` gives them: token t writes cell 2 t + 1.
static void hide_later(ggml_tensor * mask) {
    hide(mask, 3, 2, 2);
}

static void hide_behind(ggml_tensor * mask, int64_t before) {
    hide(mask, before + 1, 1, 1);
}

// causal  whether the masks in `causal` are causal and rows are written to their normal place; false: neither
static void fill_all(const graph & g, bool causal = true) {
    float seed = 1;
    for (ggml_tensor * t : g.inputs) {
        if (t->buffer) {  // a random graph may not use it
            fill(t, seed);
        }
        seed++;
    }
    for (ggml_tensor * mask : g.causal) {
        if (causal && mask->buffer) {
            hide_later(mask);
        }
    }
    if (g.mask && g.mask->buffer && causal) {
        hide_behind(g.mask, g.before);
    }
    if (g.rows && !causal) {
        std::vector<int64_t> rows((size_t) g.rows->ne[0]);
        for (size_t i = 0; i < rows.size(); i++) {
            rows[i] = g.far + 2 * (int64_t) i + 1;
        }
        ggml_backend_tensor_set(g.rows, rows.data(), 0, ggml_nbytes(g.rows));
    }
    if (g.places) {
        std::vector<int64_t> places((size_t) g.places->ne[0]);
        for (size_t i = 0; i < places.size(); i++) {
            places[i] = (int64_t) (i % 64) * g.n_cell + 2 * (int64_t) (i / 64) + 1;
        }
        ggml_backend_tensor_set(g.places, places.data(), 0, ggml_nbytes(g.places));
    }
}

outcome compute(ggml_backend_dev_t dev, const builder & build, memory how) {
    ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
    graph            g;
    build(g);
    ggml_backend_buffer_ptr buffer;
    ggml_gallocr_ptr        allocator;
    if (how == memory::OWN) {
        buffer.reset(ggml_backend_alloc_ctx_tensors(g.get(), backend.get()));
        check(buffer != nullptr, "no memory");
    } else {
        allocator.reset(ggml_gallocr_new(ggml_backend_dev_buffer_type(dev)));
        check(ggml_gallocr_alloc_graph(allocator.get(), g.cgraph), "no memory");
    }
    for (const uint64_t uid : { 0, 7, 7 }) {
        g.cgraph->uid = uid;
        fill_all(g);
        check(ggml_backend_graph_compute(backend.get(), g.cgraph) == GGML_STATUS_SUCCESS, "graph_compute failed");
    }
    return read_all(g);
}

// A program that examines nodes, and the values that it reads.
struct watcher {
    std::string wanted;  // nodes to examine: "all", or an op's name; for an op also its sources
    outcome     seen;
};

static bool watch(ggml_tensor * t, bool ask, void * data) {
    auto *     w      = (watcher *) data;
    const bool wanted = w->wanted == "all" || w->wanted == ggml_op_name(t->op);
    if (!ask && wanted && t->type == GGML_TYPE_F32 && ggml_is_contiguous(t)) {
        w->seen.push_back(read(t));
        // results of other ops may reuse a source's memory
        for (const ggml_tensor * src : t->src) {
            if (t->op == GGML_OP_MUL_MAT && w->wanted != "all" && src && src->type == GGML_TYPE_F32 &&
                ggml_is_contiguous(src)) {
                w->seen.push_back(read(src));
            }
        }
    }
    return ask ? wanted : true;
}

// Computes a graph that ggml's scheduler allocates.
static outcome compute_scheduled(const std::vector<ggml_backend_dev_t> & devices,
                                 const builder &                         build,
                                 watcher *                               w = nullptr) {
    std::vector<ggml_backend_ptr> owners;
    std::vector<ggml_backend_t>   backends;
    for (ggml_backend_dev_t dev : devices) {
        owners.emplace_back(ggml_backend_dev_init(dev, nullptr));
        backends.push_back(owners.back().get());
    }
    ggml_backend_sched_ptr scheduler(
        ggml_backend_sched_new(backends.data(), nullptr, (int) backends.size(), GGML_DEFAULT_GRAPH_SIZE, false, false));
    if (w) {
        ggml_backend_sched_set_eval_callback(scheduler.get(), watch, w);
    }
    graph g;
    build(g);
    for (ggml_tensor * t : g.inputs) {
        ggml_backend_sched_set_tensor_backend(scheduler.get(), t, backends.front());
    }
    check(ggml_backend_sched_alloc_graph(scheduler.get(), g.cgraph), "no memory");
    for (int i = 0; i < 2; i++) {
        fill_all(g);
        if (w) {
            w->seen.clear();
        }
        check(ggml_backend_sched_graph_compute(scheduler.get(), g.cgraph) == GGML_STATUS_SUCCESS,
              "graph_compute failed");
    }
    return read_all(g);
}

void compare(const outcome & got, const outcome & wanted, double limit, const std::string & what) {
    check(got.size() == wanted.size(), what + ": " + std::to_string(got.size()) + " results");
    for (size_t i = 0; i < got.size(); i++) {
        const double error = nmse(got[i], wanted[i]);
        check(error <= limit, what + ": result " + std::to_string(i) + " has error " + std::to_string(error));
    }
}

// Computes with groups, without, and by the CPU; `times` is the number of launches of groups per computation.
static void against(const std::function<outcome(bool)> & compute, int expected, int times, double limit = 1e-6) {
    const outcome wanted = compute(false);
    launches();
    enable(true);
    const outcome fused = ::launches() == 0 ? compute(true) : outcome{};
    const int     n     = launches();
    enable(false);
    const outcome unfused = compute(true);
    check(launches() == 0, "groups were launched that are turned off");
    enable(true);
    check(expected == ANY || n == expected * times,
          std::to_string(n) + " groups were launched, not " + std::to_string(expected * times));
    compare(fused, unfused, limit, "with groups and without");
    compare(fused, wanted, 1e-4, "by the CPU");
}

int expected_launches(const builder & build) {
    graph g;
    build(g);
    return g.launches;
}

void run_own(const builder & build, int expected) {
    against([&](bool here) { return compute(here ? neuron : cpu, build, memory::OWN); }, expected, 3);
}

void run_reused(const builder & build) {
    against([&](bool here) { return compute(here ? neuron : cpu, build, memory::REUSED); }, expected_launches(build),
            3);
}

void run_scheduled(const builder & build, double limit) {
    const std::vector<ggml_backend_dev_t> alone{ cpu };
    const std::vector<ggml_backend_dev_t> both{ neuron, cpu };
    against([&](bool here) { return compute_scheduled(here ? both : alone, build); }, expected_launches(build), 2,
            limit);
}

void run_watched(const builder & build, const std::string & wanted, int expected) {
    const std::vector<ggml_backend_dev_t> alone{ cpu };
    const std::vector<ggml_backend_dev_t> both{ neuron, cpu };
    against(
        [&](bool here) {
            watcher w{ wanted, {} };
            outcome out = compute_scheduled(here ? both : alone, build, &w);
            check(!w.seen.empty(), "nothing was seen");
            out.insert(out.end(), w.seen.begin(), w.seen.end());
            return out;
        },
        expected, 2);
}

void run_changing(const builder & build, int expected) {
    const auto compute = [&build](ggml_backend_dev_t dev, std::vector<int> * counts) {
        ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
        graph            g;
        build(g);
        ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(g.get(), backend.get()));
        g.cgraph->uid = 7;
        outcome all;
        for (const bool causal : { true, false, true, true, false, false, true }) {
            fill_all(g, causal);
            check(ggml_backend_graph_compute(backend.get(), g.cgraph) == GGML_STATUS_SUCCESS, "graph_compute failed");
            const outcome one = read_all(g);
            all.insert(all.end(), one.begin(), one.end());
            if (counts) {
                counts->push_back(launches());
            }
        }
        return all;
    };
    launches();
    std::vector<int> counts;
    compare(compute(neuron, &counts), compute(cpu, nullptr), 1e-4, "by the CPU");
    check(counts == std::vector<int>{ expected, 0, expected, expected, 0, 0, expected }, "other launches");
}

// A way to write to a tensor on a device. `data` has the tensor's size.
using writer = std::function<void(ggml_backend_t backend, ggml_tensor * t, const std::vector<uint8_t> & data)>;

static ggml_backend_buffer_ptr allocate(const ggml_context_ptr & ctx, ggml_backend_t backend) {
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
    check(buffer != nullptr, "no memory");
    return buffer;
}

// Copies from a tensor of another device or of the same one, between buffers or between backends.
static void write_from(ggml_backend_dev_t           dev,
                       bool                         async,
                       ggml_backend_t               backend,
                       ggml_tensor *                t,
                       const std::vector<uint8_t> & data) {
    ggml_backend_ptr        other(ggml_backend_dev_init(dev, nullptr));
    ggml_init_params        params = { ggml_tensor_overhead(), nullptr, true };
    ggml_context_ptr        ctx(ggml_init(params));
    ggml_tensor *           from   = ggml_dup_tensor(ctx.get(), t);
    ggml_backend_buffer_ptr buffer = allocate(ctx, other.get());
    ggml_backend_tensor_set(from, data.data(), 0, data.size());
    if (async) {
        ggml_backend_tensor_copy_async(other.get(), backend, from, t);
        ggml_backend_synchronize(backend);
    } else {
        ggml_backend_tensor_copy(from, t);
    }
}

// A launch computes the copy.
static void write_by_launch(ggml_backend_t backend, ggml_tensor * t, const std::vector<uint8_t> & data) {
    graph g;
    find_builder("copied-mask")(g);
    ggml_tensor * from = g.inputs[0];
    ggml_tensor * to   = g.inputs[1];
    for (ggml_tensor * own : { to, g.result }) {  // both are the mask
        own->buffer = t->buffer;
        own->data   = t->data;
    }
    check(ggml_are_same_shape(to, t) && to->type == t->type, "the mask differs");
    const ggml_backend_buffer_ptr buffer = allocate(g.ctx, backend);
    ggml_backend_tensor_set(from, data.data(), 0, data.size());
    check(ggml_backend_graph_compute(backend, g.cgraph) == GGML_STATUS_SUCCESS, "graph_compute failed");
}

static const std::vector<std::pair<std::string, writer>> & writers() {
    static const std::vector<std::pair<std::string, writer>> all = {
        { "set", [](ggml_backend_t, ggml_tensor * t,
         const auto & data) { ggml_backend_tensor_set(t, data.data(), 0, data.size()); } },
        { "set_async",
         [](ggml_backend_t backend, ggml_tensor * t, const auto & data) {
              ggml_backend_tensor_set_async(backend, t, data.data(), 0, data.size());
          } },
        { "rows",
         [](ggml_backend_t, ggml_tensor * t, const auto & data) {
              for (size_t at = 0; at < data.size(); at += t->nb[1]) {
                  ggml_backend_tensor_set(t, &data[at], at, t->nb[1]);
              }
          } },
        { "view",
         [](ggml_backend_t, ggml_tensor * t, const auto & data) {
              ggml_init_params params = { 2 * ggml_tensor_overhead(), nullptr, true };
              ggml_context_ptr ctx(ggml_init(params));
              const size_t     half = (size_t) (t->ne[1] / 2) * t->nb[1];
              ggml_tensor *    view = ggml_view_2d(ctx.get(), t, t->ne[0], t->ne[1] - t->ne[1] / 2, t->nb[1], half);
              check(ggml_backend_view_init(view) == GGML_STATUS_SUCCESS, "no view");
              ggml_backend_tensor_set(view, &data[half], 0, data.size() - half);
              ggml_backend_tensor_set(t, data.data(), 0, half);
          } },
        { "memset",
         [](ggml_backend_t, ggml_tensor * t, const auto & data) {
              for (size_t at = 0; at < data.size(); at++) {
                  ggml_backend_tensor_memset(t, data[at], at, 1);
              }
          } },
        { "copy", [](ggml_backend_t backend, ggml_tensor * t,
         const auto & data) { write_from(neuron, false, backend, t, data); } },
        { "copy_async", [](ggml_backend_t backend, ggml_tensor * t,
         const auto & data) { write_from(neuron, true, backend, t, data); } },
        { "copy_from_core",
         [](ggml_backend_t backend, ggml_tensor * t, const auto & data) {
              write_from(ggml_backend_reg_dev_get(neurons, 1), true, backend, t, data);
          } },
        { "copy_from_host", [](ggml_backend_t backend, ggml_tensor * t,
         const auto & data) { write_from(cpu, false, backend, t, data); } },
        { "copy_from_host_async",
         [](ggml_backend_t backend, ggml_tensor * t, const auto & data) { write_from(cpu, true, backend, t, data); } },
        { "launch", write_by_launch },
    };
    return all;
}

void run_written(const builder & build, int expected) {
    const auto compute = [&build, expected](ggml_backend_dev_t dev) {
        ggml_backend_ptr backend(ggml_backend_dev_init(dev, nullptr));
        graph            g;
        build(g);
        const ggml_backend_buffer_ptr buffer = allocate(g.ctx, backend.get());
        ggml_tensor *                 mask   = g.causal.front();
        std::vector<uint8_t>          data[2];  // causal and not causal
        for (const bool causal : { false, true }) {
            fill_all(g, causal);
            data[causal].resize(ggml_nbytes(mask));
            ggml_backend_tensor_get(mask, data[causal].data(), 0, data[causal].size());
        }
        g.cgraph->uid = 7;
        outcome    all;
        const auto again = [&](bool causal, const std::string & how) {
            check(ggml_backend_graph_compute(backend.get(), g.cgraph) == GGML_STATUS_SUCCESS, "graph_compute failed");
            const outcome one = read_all(g);
            all.insert(all.end(), one.begin(), one.end());
            const int n = launches();
            check(dev == cpu || n == (causal ? expected : 0), how + ": " + std::to_string(n) + " launches");
        };
        for (const auto & [how, write] : writers()) {
            for (const bool causal : { true, false }) {
                ggml_backend_tensor_set(mask, data[!causal].data(), 0, data[!causal].size());
                again(!causal, "before " + how);
                if (dev == cpu) {
                    ggml_backend_tensor_set(mask, data[causal].data(), 0, data[causal].size());
                } else {
                    write(backend.get(), mask, data[causal]);
                }
                again(causal, how);
            }
        }
        return all;
    };
    launches();
    compare(compute(neuron), compute(cpu), 1e-4, "by the CPU");
}

void run_threads(const builder & build) {
    const outcome                   wanted = compute(cpu, build, memory::OWN);
    std::vector<std::exception_ptr> errors(3);
    std::vector<std::thread>        threads;
    launches();
    for (std::exception_ptr & error : errors) {
        threads.emplace_back([&wanted, &build, &error] {
            try {
                for (int i = 0; i < 3; i++) {
                    compare(compute(neuron, build, memory::OWN), wanted, 1e-4, "in a thread");
                    enable(i != 0);
                }
            } catch (...) {
                error = std::current_exception();
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    enable(true);
    for (const std::exception_ptr & error : errors) {
        if (error) {
            std::rethrow_exception(error);
        }
    }
    check(launches() > 0, "no group was launched");
}
