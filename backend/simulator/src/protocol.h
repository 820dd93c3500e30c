// The messages between the library and its helper; tools/kernelgen/simulator/protocol.py is the other side.
//
// Numbers have the machine's byte order. The helper inherits the control socket (AF_UNIX, SOCK_SEQPACKET: one message
// is one packet). The library sends a greeting on it, and the helper answers when it is ready. Then the library passes
// lanes. A lane is the read end of one pipe and the write end of another. It carries one request at a time and then its
// answer, each after its size in bytes as uint32_t. Threads that execute at the same time use different lanes. The
// helper ends when the control socket closes.

#pragma once

#include <cstddef>
#include <cstdint>

namespace simulator::protocol {

constexpr uint32_t VERSION     = 5;
constexpr size_t   MAX_MESSAGE = 65536;

enum operation : uint32_t {
    HELLO   = 1,  // control; carries a descriptor per arena
    LANE    = 2,  // control; carries the lane; not answered
    LOAD    = 3,
    EXECUTE = 4,
    UNLOAD  = 5,
};

struct hello {
    uint32_t operation;
    uint32_t version;
    uint32_t arenas;
    uint32_t zero;
    // uint64_t size[arenas] follows
};

struct load {
    uint32_t operation;
    uint32_t arena;
    uint64_t offset;
    uint64_t size;
    uint32_t ranks;  // ranks that load and execute it together; 0: a single rank
    uint32_t zero;
};

struct execute {
    uint32_t operation;
    uint32_t tensors;
    uint64_t model;
    // binding[tensors] follows: inputs, then outputs; for each rank that executes the model, one after the other
};

struct binding {
    uint32_t arena;
    uint32_t zero;
    uint64_t offset;
};

struct unload {
    uint32_t operation;
    uint32_t zero;
    uint64_t model;
};

// Every answer. If the status is not NRT_SUCCESS, the reason follows as text.
struct answer {
    uint32_t status;
    uint32_t tensors;  // in the answer to a LOAD that succeeded: the number of `tensor` that follow `loaded`
};

// After an answer to LOAD.
struct loaded {
    uint64_t model;
    uint64_t scratchpad;    // bytes besides inputs and outputs
    uint64_t code;          // bytes of instructions and of rings for spills, for all physical cores
    uint64_t descriptors;   // DMA descriptors per physical core
    uint32_t core_version;  // the NeuronCore version that it was compiled for, such as 2 for trn1; 0: unknown
    uint32_t collectives;   // the number of collectives
};

// Follows for each tensor, before its shape and its name.
struct tensor {
    uint32_t usage;
    uint32_t dtype;
    uint64_t size;
    int32_t  alias;  // of an output: the number of the input whose memory it overwrites, or -1
    uint32_t ndim;   // uint32_t shape[ndim] follows
    uint32_t name;   // char name[name] follows the shape
    uint32_t zero;
};

}  // namespace simulator::protocol
