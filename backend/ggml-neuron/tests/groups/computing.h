// How graphs are computed, with groups and without, and compared.

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

// What a graph leaves behind: outputs, in the order of the nodes, and the inputs that it changes.
using outcome = std::vector<std::vector<float>>;

enum class memory { OWN, REUSED };

// Computes a graph three times, the last time under the number of the one before.
outcome compute(ggml_backend_dev_t dev, const builder & build, memory how);

void compare(const outcome & got, const outcome & wanted, double limit, const std::string & what);

int expected_launches(const builder & build);

void run_own(const builder & build, int expected);

void run_reused(const builder & build);

void run_scheduled(const builder & build, double limit = 1e-6);

// A program looks at nodes, and at what they read: what it sees is what it sees without groups.
void run_watched(const builder & build, const std::string & wanted, int expected);

// The mask of a graph, which is computed again under its number, is causal or not.
void run_changing(const builder & build, int expected);

// The same, with each way in which memory is written.
void run_written(const builder & build, int expected);

// Threads compute a graph, each with a backend of its own, while groups are turned off and on.
void run_threads(const builder & build);
