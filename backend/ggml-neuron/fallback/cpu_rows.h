// Which bytes of device memory move when the CPU computes a node: the bytes that the node reads and writes, and small
// gaps between them.

#pragma once

#include "fallback/cpu.h"

#include <cstdint>
#include <vector>

// Bytes of a tensor, by their addresses.
struct neuron_bytes {
    const char * begin;
    const char * end;
};

// Returns the byte ranges of a tensor's elements, ascending.
std::vector<neuron_bytes> neuron_bytes_of(const ggml_tensor * t);

// Returns the ranges to move for some bytes: neighboring ranges are merged.
std::vector<neuron_bytes> neuron_unite(std::vector<neuron_bytes> bytes);

// Reads the rows that a GET_ROWS node selects, one after the other. `ids` is in host memory, with the layout of the
// node's source. Returns false when a transfer fails or an id is out of range.
bool neuron_read_rows(const ggml_tensor *        node,
                      const void *               ids,
                      std::vector<uint8_t> &     rows,
                      const neuron_host_access & access);

// Writes rows to the result of a SET_ROWS node at the positions in `ids`. Both are in host memory. `rows` has the
// node's type and is dense; `ids` has the layout of the node's source. Returns false when a transfer fails or an id is
// out of range.
bool neuron_write_rows(const ggml_tensor *        node,
                       const void *               ids,
                       const void *               rows,
                       const neuron_host_access & access);
