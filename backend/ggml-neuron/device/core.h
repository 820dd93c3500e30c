// One NeuronCore: its memory, the models loaded on it, and kernels bound to memory.
//
// It does not depend on ggml's graphs. A kernel is bound to operands once (`bind`) and then executed any number of
// times.
//
// Threads: the functions of neuron_memory and neuron_core lock the core. The caller of a function marked "locked" holds
// the core's mutex, which also keeps the returned objects alive.

#pragma once

#include "../../bundle/src/hash.h"
#include "device/launch_queue.h"
#include "nrt.h"
#include "select/kernel_store.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

struct neuron_core;

// Alignment of the backend's allocations, in bytes. Kernel arguments are slices of device tensors, and DMA of less than
// 512 bytes, or not aligned to 512, is slow. A view may begin at any byte.
constexpr size_t NEURON_ALIGNMENT = 512;

// Core memory that libnrt takes for programs: micro-code once per physical core, and pages of a shared scratchpad.
// Besides its tensors each program also takes 64 bytes per instruction and 32 per run of a spill, which bundles state.
// Source: AWS Neuron, "Neuron device memory" of the troubleshooting guide.
constexpr size_t NEURON_MICROCODE_MEMORY = (size_t) 96 << 20;

// Returns the bytes by which a runtime's scratchpad grows, or 0 for an unknown runtime.
size_t neuron_scratchpad_page(const neuron_nrt & nrt);

// The most bytes of one tensor: releases of libnrt before 2.28 miscalculate sizes of 4 GiB and more. Source: AWS
// Neuron's runtime release notes, known issues.
constexpr size_t NEURON_MAX_TENSOR = (size_t) 2 << 30;

// The most programs to reserve memory for: a bundle may have kernels for many more sizes than one run uses.
constexpr size_t NEURON_RESERVED_PROGRAMS = 1024;

// Host copies of device memory, from the host's writes and reads: device/known_bytes.h.
class neuron_known_bytes {
  public:
    // Returns the bytes from an offset on, or NULL when the copies lack some of them. They do not change while the
    // caller holds them.
    std::shared_ptr<const uint8_t> get(size_t offset, size_t size);

    // Keeps a copy of bytes that are in the memory now. Evicts the least recently used copies.
    void set(size_t offset, const void * data, size_t size);

    // Invalidates copies of bytes that are about to change.
    void forget(size_t offset, size_t size);

  private:
    // Stretches with `good` set do not overlap.
    struct stretch {
        size_t                                offset = 0;
        std::shared_ptr<std::vector<uint8_t>> data;
        bool                                  good      = false;
        uint64_t                              last_used = 0;
    };

    std::vector<stretch> stretches;
    uint64_t             clock = 0;
};

// A deferred write. It shares a transfer with its neighbors.
struct neuron_staged {
    size_t               offset = 0;
    size_t               room   = 0;  // bytes from the offset on that belong to no other tensor
    std::vector<uint8_t> data;
};

// The most staged bytes of a memory: moving more takes longer than the fixed cost of a transfer.
constexpr size_t NEURON_MAX_STAGED = (size_t) 1 << 20;

// A stretch of device memory: one NRT tensor, and the slices of it that kernels are bound to.
struct neuron_memory {
    neuron_core *  core   = nullptr;
    nrt_tensor_t * tensor = nullptr;
    size_t         size   = 0;
    uint64_t       id     = 0;  // unique in the process

    // Grows before each change of bytes. The core's mutex guards it.
    mutable uint64_t version = 0;

    // Also guarded by the core's mutex: copies of the program's writes. `keeps` is true after the first request for
    // one.
    mutable neuron_known_bytes known;
    mutable bool               keeps = false;

    // locked. Call this before bytes change.
    void note_change(size_t offset, size_t n) const {
        version++;
        known.forget(offset, n);
    }

    std::map<std::pair<size_t, size_t>, nrt_tensor_t *> slices;  // by (offset, size)

    // Guarded by the core's mutex. Staged writes do not overlap.
    std::vector<neuron_staged> staged;

    // Defers a small write until the memory is used next, or writes a large one at once, and keeps the bytes as known.
    // `room` is neuron_staged::room. Returns "", or the failure so far.
    std::string stage(const void * data, size_t offset, size_t n, size_t room);

    // locked. Writes the staged bytes. Neighbors share a transfer when no bytes of another tensor lie between them.
    NRT_STATUS write_staged();

    // Each waits for launches that use the bytes. Returns "" on success; else reports the failure and returns it.
    std::string write(const void * data, size_t offset, size_t n);
    std::string read(void * data, size_t offset, size_t n);
    std::string set(uint8_t value, size_t offset, size_t n);

    // locked. Each waits, with the mutex unlocked, for launches that use the bytes, and reports a failure. Reading
    // bytes that a failed launch poisoned is a failure.
    NRT_STATUS write_locked(const void * data, size_t offset, size_t n);
    NRT_STATUS read_locked(void * data, size_t offset, size_t n);
    NRT_STATUS set_locked(uint8_t value, size_t offset, size_t n);

    // locked. Returns the last failure.
    const std::string & last_failure() const { return failure; }

  private:
    NRT_STATUS checked(NRT_STATUS status, const char * function, size_t offset, size_t n);
    bool       wait_to_write_staged();
    void       wait_to_write(size_t offset, size_t n);

    std::string failure;  // the last one
};

// The memory of a kernel's input or result.
struct neuron_operand {
    neuron_memory * memory  = nullptr;
    size_t          offset  = 0;
    size_t          size    = 0;
    bool            written = false;  // an input that the kernel changes besides its results
};

// The operands of a kernel. For an op: its sources, absent ones with size 0, and its result. For a group: its slots and
// its results.
struct neuron_binding {
    const neuron_operand * operands  = nullptr;  // sources, then results
    size_t                 n_src     = 0;
    size_t                 n_results = 1;

    bool is_updated(size_t src) const { return src < n_src && operands[src].written; }

    size_t size() const { return n_src + n_results; }
};

// A NEFF on the core. An unloaded model stays in the table and is loaded again when needed.
struct neuron_model {
    // An input or output under its name in the NEFF.
    struct tensor {
        std::string name;
        bool        result;    // false: a source, or its new content
        size_t      index;     // of the result or the source; of another output: its offset in `spare`
        bool        output;    // a result, or the new content of a source
        size_t      size;      // bytes
        bool        is_spare;  // an output of the compiler's own, such as values between subgraphs
    };

    neuron_kernel         kernel;  // one of the kernels that share the NEFF
    std::string           name;    // for messages: the kernel's id and its bundle
    nrt_model_t *         handle = nullptr;
    std::vector<tensor>   tensors;
    size_t                spare_bytes = 0;        // of the compiler's own outputs
    neuron_memory *       spare       = nullptr;  // memory for them, which nothing reads
    uint64_t              last_used   = 0;
    bool                  evicted     = false;    // it was unloaded to free memory
    bool                  measured    = false;    // its memory was measured
    neuron_program_memory memory;                 // as stated in its bundle
    bool                  collective  = false;    // loaded on several cores at once; never unloaded to free memory
    size_t                used_before = 0;        // bytes in use on the core before its load, of a collective

    // Why the model does not fit even after every other model was unloaded; "" when it was not refused. The core tries
    // it again only when its tensors take less memory than `refused_beside`.
    std::string refused;
    size_t      refused_beside = 0;  // bytes
    std::string broken;              // why it is unusable for good; "" without a known reason
};

// A kernel bound to operands.
struct neuron_bound_launch {
    neuron_model *          model  = nullptr;
    nrt_tensor_set_t *      input  = nullptr;
    nrt_tensor_set_t *      output = nullptr;
    std::vector<neuron_use> uses;  // of the memory of its operands
};

struct neuron_core {
    neuron_core(const neuron_nrt & nrt, int vnc);
    neuron_core(const neuron_core &) = delete;

    const neuron_nrt & nrt;
    const int          vnc;
    std::mutex         mutex;

    // The thread that plans and launches a graph locks this before `mutex`. Bound launches then survive while it waits
    // with `mutex` unlocked.
    std::mutex graph_mutex;

    neuron_launch_queue launch_queue;

    // Grows when bound launches are destroyed or memory is freed: pointers to either may then be invalid.
    uint64_t epoch = 1;

    // Initializes libnrt, which claims the process's cores. On failure reports it and returns false.
    bool open();

    // Returns memory, or reports the failure and returns NULL.
    neuron_memory * allocate(size_t size);
    void            free(neuron_memory * memory);
    void            free_locked(neuron_memory * memory);

    // locked. Returns memory for an optional use, or NULL when too little would remain: a sixteenth of the core's
    // memory stays free beside the memory of the bundles' programs.
    neuron_memory * allocate_spare(size_t size, const neuron_programs & all);

    // Sets both to 0 when the library reports no figures. The free memory excludes an estimate for programs that are
    // not loaded yet: their bundles' figures times the measured ratio of the loaded programs. A program without a
    // figure counts as the average of the loaded ones.
    void memory_stats(const neuron_programs & all, size_t * free, size_t * total);

    // Loads the kernels' NEFFs until the memory is full, without unloading programs. Prints a line when this takes long
    // on a device. Reports failures; `bind` tries those programs again.
    void preload(const std::vector<neuron_kernel> & kernels);

    // Reads the NEFF of a program with collectives, and unloads others to make room for it; sets `neff` to empty if the
    // program is already loaded. On a broken NEFF, or too little memory, reports it and returns false.
    bool prepare_collective(const neuron_kernel & kernel, std::vector<uint8_t> & neff);

    // Adds a program with collectives that is loaded on all cores. On failure reports it and returns false.
    bool add_collective(const neuron_kernel & kernel, nrt_model_t * handle, uint32_t rank, uint32_t n_ranks);

    // The most ranks of a program that this core has loaded: the size of libnrt's communicator.
    std::atomic<uint32_t> communicator{ 0 };

    // Returns whether loading the kernel's NEFF has failed for good.
    bool is_broken(const neuron_kernel & kernel);
    bool is_broken_locked(const neuron_kernel & kernel) const;

    // locked. Returns whether a plan can't use the kernel: it is broken, or does not fit beside the core's tensors.
    // Loading its program shows either, also when it is loaded again after an eviction.
    bool is_unusable(const neuron_kernel & kernel) const;

    // Frees the core's own memory: loaded models, bound kernels and scratch memory.
    void release();

    // locked. Returns scratch memory of at least this size, or reports the failure and returns NULL. Growing it
    // discards its contents.
    neuron_memory * scratch(size_t size);

    // locked. Returns device memory with numbers for a kernel, or memory NULL with the reason in `message`. Nothing
    // else is written there later, so launches in flight keep their numbers. Equal numbers are stored once.
    neuron_operand numbers(const std::vector<float> & values, std::string & message);

    // locked. Returns the kernel bound to operands; equal arguments give the same bound launch. Returns NULL on
    // failure: `message` holds the reason, or is empty when the core has already reported a lack of memory. `broken` is
    // set when binding will never work, or not before memory is freed, after which every plan is made again.
    neuron_bound_launch * bind(const neuron_kernel &  kernel,
                               const neuron_binding & binding,
                               std::string &          message,
                               bool &                 broken);

    // locked. Launches a kernel, and loads its model again if it was evicted; reports a failure to do so. `node`
    // describes the computed node. Waits, with the mutex unlocked, while the queue is full. Returns an
    // earlier failed launch's status, if the stream has one.
    NRT_STATUS execute(neuron_bound_launch & bound_launch, neuron_stream & stream, const char * node);

    // locked. Writes the staged bytes of all memories. Call it before a graph is launched.
    NRT_STATUS write_staged();

    // locked. Writes, and copies within the core's memory, in order with a stream's launches.
    NRT_STATUS write(neuron_stream & stream, const neuron_operand & to, std::vector<uint8_t> data);
    NRT_STATUS copy(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to);

    // locked. Waits for the stream's launches. Returns and clears the status of the first one that failed, for the
    // caller of the current graph.
    NRT_STATUS finish(neuron_stream & stream);

    // locked. Copies within the core's memory.
    NRT_STATUS copy(const neuron_operand & from, const neuron_operand & to);

    // Copies from another core's memory, through the host, after that core has computed it. A failure counts as one of
    // the stream's launches.
    void copy_from(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to);

  private:
    NRT_STATUS try_launch(neuron_bound_launch & bound_launch, neuron_stream & stream, const std::string & node);
    std::vector<uint64_t> ids_of_staged() const;
    NRT_STATUS            load(neuron_model & model, std::string & message, bool make_room = true);
    bool                  is_refused(const neuron_model & model) const;
    bool                  is_unusable(const neuron_model & model) const;
    bool                  read_neff(neuron_model & model, std::vector<uint8_t> & neff, std::string & message);
    bool                  stats(nrt_vnc_memory_stats_t & stats) const;
    bool                  memory(nrt_vnc_memory_stats_t & memory) const;
    size_t                pages(size_t scratchpad) const;
    size_t                used() const;
    void                  note_size(neuron_model & model, size_t before);
    size_t                program_size() const;
    size_t                missing_programs(const neuron_programs & all) const;
    size_t                missing_for(const neuron_model & model) const;
    void                  count_loaded();
    bool                  could_fit(size_t size) const;
    static size_t         microcode(const neuron_nrt & nrt);
    std::string           occupancy(size_t needed, const char * at_least) const;
    void                  note_reload();
    void                  note_refusal(const neuron_model & model);
    NRT_STATUS            read_tensors(neuron_model & model, std::string & message);
    void                  mark_broken(neuron_model & model, const std::string & why);
    void                  unload(neuron_model & model);
    bool                  evict();
    neuron_model &        model_of(const neuron_kernel & kernel);
    void                  free_numbers();
    neuron_memory *       allocate_locked(size_t size, std::string & message, bool make_room = true);
    nrt_tensor_t *        slice(neuron_memory & memory, size_t offset, size_t size, std::string & message);
    bool fill(neuron_bound_launch & bound_launch, const neuron_binding & binding, std::string & message);

    std::unique_ptr<neuron_bound_launch> make_bound_launch(neuron_model &         model,
                                                           const neuron_binding & binding,
                                                           std::string &          message);
    void                                 destroy(neuron_bound_launch & bound_launch);
    template <typename F> void           destroy_bound_launches(F which);
    void                                 destroy_all_bound_launches();
    void                                 destroy_bound_launches_of(uint64_t memory);
    void                                 destroy_bound_launches_and_slices();

    struct key_hash {
        size_t operator()(const std::vector<uint64_t> & key) const {
            return (size_t) nk::hash_words(key.data(), key.size());
        }
    };

    std::unordered_map<uint64_t, std::unique_ptr<neuron_model>> models;  // by neuron_kernel::neff_number
    std::unordered_map<std::vector<uint64_t>, std::unique_ptr<neuron_bound_launch>, key_hash> bound_launches;
    std::unordered_map<uint64_t, std::unique_ptr<neuron_memory>>                              memories;  // by id
    neuron_memory *                                                                           scratch_memory = nullptr;
    std::map<std::vector<uint32_t>, neuron_operand> kept_numbers;  // by their bits
    std::vector<neuron_memory *> numbers_memory;                   // the last one has free memory from `numbers_end` on
    size_t                       numbers_end    = 0;
    uint64_t                     clock          = 0;
    uint64_t                     next_memory_id = 1;
    const size_t                 page;                  // of the scratchpad; 0: unknown
    std::atomic<size_t>          tensor_bytes = 0;      // of all memories
    size_t                       n_reloads    = 0;
    bool                         said_full    = false;  // a full memory was reported since memory was last freed
    std::atomic<size_t>          n_loaded{ 0 };
    std::atomic<size_t>          n_measured{ 0 };       // programs whose size was measured at loading
    std::atomic<size_t>          measured_bytes{ 0 };   // their bytes
    std::atomic<size_t> compared_bytes{ 0 };   // bytes of the measured programs that also have a figure in their bundle
    std::atomic<size_t> stated_bytes{ 0 };     // the bundles' figures for the same programs
    std::atomic<size_t> loaded_bytes{ 0 };     // the bundles' figures for the loaded programs
    std::atomic<size_t> loaded_unstated{ 0 };  // the number of loaded programs without a figure
    std::atomic<size_t> loaded_pages{ 0 };     // their bytes of the scratchpad
    std::atomic<bool>   any_broken{ false };
};

// Loads a program with collectives on several cores at once, as ranks in this order. Holds no core meanwhile. On failure
// reports it and returns false; after a failure of one rank it does not wait for the others.
bool neuron_load_on_all(const std::vector<neuron_core *> & cores, const neuron_kernel & kernel);
