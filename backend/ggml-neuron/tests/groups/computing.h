// Computes graphs with groups and without, and compares the results.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "graph.h"

#include <string>
#include <vector>

extern ggml_backend_reg_t neurons;
extern ggml_backend_dev_t neuron;
extern ggml_backend_dev_t cpu;

int launches();

// The results of a graph: its outputs, in the order of the nodes, and the inputs that it changes.
using outcome = std::vector<std::vector<float>>;

enum class memory { OWN, REUSED };

// Computes a graph three times; the third graph has the same number as the second.
outcome compute(ggml_backend_dev_t dev, const builder & build, memory how);

void compare(const outcome & got, const outcome & wanted, double limit, const std::string & what);

int expected_launches(const builder & build);

void run_own(const builder & build, int expected);

void run_reused(const builder & build);

void run_scheduled(const builder & build, double limit = 1e-6);

// A program examines nodes and their sources. It must read the same values as without groups.
void run_watched(const builder & build, const std::string & wanted, int expected);

// Computes a graph repeatedly under its number, with a mask that is causal or not.
void run_changing(const builder & build, int expected);

// Does the same with each way to write to memory.
void run_written(const builder & build, int expected);

// Threads compute a graph, each with its own backend, while groups are turned off and on.
void run_threads(const builder & build);
