// How the rows that SET_ROWS made on the CPU get to device memory.

#pragma once

#include "cpu.h"

// Writes rows to the result of a SET_ROWS node, whose `ids` say where each goes; both are in host memory. `rows` has the node's type, and
// is dense; `ids` is laid out as the node's source. Returns false when a transfer fails, or an id is of no row.
bool neuron_write_rows(const ggml_tensor *        node,
                       const void *               ids,
                       const void *               rows,
                       const neuron_host_access & access);
