// Which bytes of device memory move when the CPU computes a node: those that it reads and writes, and what is between them where that is
// little.

#pragma once

#include "fallback/cpu.h"

#include <cstdint>
#include <vector>

// Bytes of a tensor, by their addresses.
struct neuron_bytes {
    const char * begin;
    const char * end;
};

// Returns the bytes that a tensor's elements are in, ascending.
std::vector<neuron_bytes> neuron_bytes_of(const ggml_tensor * t);

// Returns what to move for some bytes: those that lie near each other move at once.
std::vector<neuron_bytes> neuron_unite(std::vector<neuron_bytes> bytes);

// Reads the rows that a GET_ROWS node picks, one after the other. `ids` is in host memory, laid out as the node's source. Returns false when
// a transfer fails, or an id is of no row.
bool neuron_read_rows(const ggml_tensor *        node,
                      const void *               ids,
                      std::vector<uint8_t> &     rows,
                      const neuron_host_access & access);

// Writes rows to the result of a SET_ROWS node, whose `ids` say where each goes; both are in host memory. `rows` has the node's type, and
// is dense; `ids` is laid out as the node's source. Returns false when a transfer fails, or an id is of no row.
bool neuron_write_rows(const ggml_tensor *        node,
                       const void *               ids,
                       const void *               rows,
                       const neuron_host_access & access);
