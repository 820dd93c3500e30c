// Code that scenarios share: devices, graphs, computing and comparing. main.cpp describes scenarios.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

extern ggml_backend_reg_t neurons;  // all NeuronCores
extern ggml_backend_dev_t neuron;   // the first NeuronCore
extern ggml_backend_dev_t cpu;

// The functions of scenarios, by name. A function throws a description of the mistake.
using scenario_table = std::map<std::string, std::function<void()>>;

scenario_table graphs_scenarios();
scenario_table device_scenarios();
scenario_table lacking_scenarios();
scenario_table scheduled_scenarios();
scenario_table threads_scenarios();
scenario_table failures_scenarios();
scenario_table in_flight_scenarios();
scenario_table two_cores_scenarios();
scenario_table weights_scenarios();
scenario_table tokens_scenarios();

// A context for tensors that get memory later. The tensor objects are in `memory`, if it is given.
struct context {
    static size_t size() { return ggml_tensor_overhead() * 64 + ggml_graph_overhead(); }

    ggml_context_ptr ctx;

    explicit context(void * memory = nullptr) {
        ggml_init_params params = { size(), memory, true };
        ctx.reset(ggml_init(params));
    }

    ggml_context * get() const { return ctx.get(); }
};

// A scenario's graph: its result, and the tensors to fill before it is computed.
struct built {
    ggml_tensor *              result;
    std::vector<ggml_tensor *> inputs;
};

using builder = std::function<built(ggml_context *)>;

// The distribution of a graph by a scheduler: the number of nodes on the first backend, and the number of splits there.
struct share {
    int nodes  = 0;
    int of     = 0;
    int splits = 0;
};

// Returns numbers that are the same in each run.
std::vector<float> numbers(size_t n, float seed);

ggml_backend_buffer_ptr allocate(const context & ctx, const ggml_backend_ptr & backend);

void fill(ggml_tensor * t, float seed);

void compare(const std::vector<float> & got, const std::vector<float> & wanted);

// Computes a node in its own graph.
void compute(ggml_tensor * node, ggml_backend_t by);

// Overwrites the three rows whose numbers `fill` sets.
void put_rows(std::vector<float> & cells, int64_t size, const std::vector<float> & values);

// Calls supports_op for every node, so that all nodes without a kernel are recorded.
void require_kernels(ggml_backend_dev_t dev, const ggml_cgraph * graph);

// Computes a graph whose tensors all have their own memory.
std::vector<float> run(ggml_backend_dev_t dev, const builder & build, int times = 1);

void against_cpu(const builder & build, int times = 1);

// Computes a graph that ggml's allocator allocates, which reuses the memory of sources.
std::vector<float> run_allocated(ggml_backend_dev_t dev, const builder & build);

// Returns a NeuronCore by its number.
ggml_backend_dev_t core(int n);

// Runs a function in `n` threads, with the thread's number, and rethrows a failure.
void in_threads(int n, const std::function<void(int)> & function);

share share_of(ggml_backend_sched_t scheduler, ggml_backend_t backend, ggml_cgraph * graph);

// Computes a graph that ggml's scheduler divides. With `watched`, the scheduler calls a callback after each node. The
// graph's tensor objects are in `memory`, if it is given.
std::vector<float> run_scheduled(const std::vector<ggml_backend_dev_t> & devices,
                                 const builder &                         build,
                                 share *                                 shared  = nullptr,
                                 bool                                    watched = false,
                                 void *                                  memory  = nullptr);

//
// graphs that several files compute
//

ggml_tensor * f32(ggml_context * ctx, int64_t ne0, int64_t ne1 = 1);

built add(ggml_context * ctx);

built chain(ggml_context * ctx);

// A write to a KV cache, and a read after it.
built cache(ggml_context * ctx);

// IM2COL reads only the shape of its kernel, so a compiler may remove it from the program's inputs.
built unused_kernel(ggml_context * ctx, ggml_tensor * kernel);

built unused(ggml_context * ctx);

// Computes nodes without a kernel that write to device memory, which no other backend can write to.
void stranded(ggml_backend_dev_t dev);
