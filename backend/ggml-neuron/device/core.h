// One NeuronCore: its memory, the models loaded on it, and kernels bound to memory.
//
// It knows nothing of ggml's graphs. A kernel is bound to operands once (`bind`) and then executed as often as wanted.
//
// Threads: the functions of neuron_memory and neuron_core lock the core; those marked "locked" are called with its mutex
// held, which also keeps what they return alive.

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

// Of what the backend places, in bytes: kernel arguments are slices of device tensors, and DMA of less than 512 bytes, or off such a
// boundary, is slow. A view may begin anywhere.
constexpr size_t NEURON_ALIGNMENT = 512;

// What libnrt takes of a core's memory for programs: micro-code once for each physical core, a scratchpad that all share, of which this
// is a page, and what each needs besides its tensors: 64 bytes an instruction and 32 a run of a spill, which bundles say.
// Source: AWS Neuron, "Neuron device memory" of the troubleshooting guide.
constexpr size_t NEURON_MICROCODE_MEMORY  = (size_t) 96 << 20;
constexpr size_t NEURON_SCRATCHPAD_MEMORY = (size_t) 64 << 20;

// The most bytes of one tensor: releases of libnrt before 2.28 compute sizes of 4 GiB and more wrongly.
// Source: AWS Neuron's runtime release notes, known issues.
constexpr size_t NEURON_MAX_TENSOR = (size_t) 2 << 30;

// Programs for which room is kept at most: a bundle may have kernels for many more sizes than one run meets.
constexpr size_t NEURON_RESERVED_PROGRAMS = 1024;

// What is known of the bytes of a memory, because the host wrote or read them: device/known_bytes.h.
class neuron_known_bytes {
  public:
    // Returns the bytes from an offset on, or NULL when not all of them are known.
    const uint8_t * get(size_t offset, size_t size);

    // Keeps what is in the memory now. What was not asked for longest is forgotten for it.
    void set(size_t offset, const void * data, size_t size);

    // Is told that bytes change.
    void forget(size_t offset, size_t size);

  private:
    // Stretches that do not overlap where they are good.
    struct stretch {
        size_t               offset = 0;
        std::vector<uint8_t> data;
        bool                 good      = false;
        uint64_t             last_used = 0;
    };

    std::vector<stretch> stretches;
    uint64_t             clock = 0;
};

// A write that waits for others beside it, so that one transfer has them all.
struct neuron_staged {
    size_t               offset = 0;
    size_t               room   = 0;  // bytes from the offset on that are nobody else's
    std::vector<uint8_t> data;
};

// Bytes of a memory that are staged at most: to move more takes longer than a transfer costs.
constexpr size_t NEURON_MAX_STAGED = (size_t) 1 << 20;

// A stretch of device memory: one NRT tensor and the slices of it that kernels are bound to.
struct neuron_memory {
    neuron_core *  core   = nullptr;
    nrt_tensor_t * tensor = nullptr;
    size_t         size   = 0;
    uint64_t       id     = 0;  // never used twice

    // Grows before bytes change; guarded by the core's mutex.
    mutable uint64_t version = 0;

    // The same goes for these: what the program wrote, once it is asked for.
    mutable neuron_known_bytes known;
    mutable bool               keeps = false;

    // locked. To be called before bytes change.
    void note_change(size_t offset, size_t n) const {
        version++;
        known.forget(offset, n);
    }

    std::map<std::pair<size_t, size_t>, nrt_tensor_t *> slices;  // by (offset, size)

    // Guarded by the core's mutex. They do not overlap.
    std::vector<neuron_staged> staged;

    // Writes bytes before the memory is used again, if they are few, else at once, and keeps what is written as known. `room` is that of
    // `neuron_staged`. Returns "" when nothing failed yet.
    std::string stage(const void * data, size_t offset, size_t n, size_t room);

    // locked. Writes what is staged, in one transfer where there is nothing of others between.
    NRT_STATUS write_staged();

    // Each waits for launches that use the bytes, and returns "" when it worked, else what failed, which it reports, too.
    std::string write(const void * data, size_t offset, size_t n);
    std::string read(void * data, size_t offset, size_t n);
    std::string set(uint8_t value, size_t offset, size_t n);

    // locked. Each waits for launches that use the bytes, with the mutex let go meanwhile, and reports what failed. To read what is poisoned
    // because a launch failed is a failure. A job waits for what is before it: `before` is its number.
    NRT_STATUS write_locked(const void * data, size_t offset, size_t n, uint64_t before = NEURON_LAST);
    NRT_STATUS read_locked(void * data, size_t offset, size_t n, uint64_t before = NEURON_LAST);
    NRT_STATUS set_locked(uint8_t value, size_t offset, size_t n);

    // locked. What failed last.
    const std::string & last_failure() const { return failure; }

  private:
    NRT_STATUS checked(NRT_STATUS status, const char * function, size_t offset, size_t n);
    bool       wait_to_write_staged();
    void       wait_to_write(size_t offset, size_t n, uint64_t before);

    std::string failure;  // what failed last
};

// Where a kernel finds an input or puts its result.
struct neuron_operand {
    neuron_memory * memory  = nullptr;
    size_t          offset  = 0;
    size_t          size    = 0;
    bool            written = false;  // an input that the kernel changes besides its results
};

// What a kernel is bound to: of an op its sources, absent ones with size 0, and its result; of a group its slots and its results.
struct neuron_binding {
    const neuron_operand * operands  = nullptr;  // sources, then results
    size_t                 n_src     = 0;
    size_t                 n_results = 1;

    bool is_updated(size_t src) const { return src < n_src && operands[src].written; }

    size_t size() const { return n_src + n_results; }
};

// A NEFF on the core. It stays in the table when it was unloaded to make room, and is loaded again when needed.
struct neuron_model {
    // An input or output by the name that the NEFF gives it.
    struct tensor {
        std::string name;
        bool        result;  // else a source, or its new content
        size_t      index;   // of the result or the source
        bool        output;  // a result, or the new content of a source
        size_t      size;    // bytes
    };

    neuron_kernel         kernel;  // one of those whose NEFF it is
    std::string           name;    // for messages: the kernel's id and its bundle
    nrt_model_t *         handle = nullptr;
    std::vector<tensor>   tensors;
    uint64_t              last_used = 0;
    bool                  evicted   = false;  // was unloaded to make room
    bool                  measured  = false;  // what it takes was seen
    neuron_program_memory memory;             // as its bundle says
    bool collective = false;  // it was loaded on several cores at once, and is never unloaded to make room

    // Why it does not fit, though every other model was unloaded for it; empty when it was not refused. It is not tried again before the
    // core's tensors take less memory than they did then.
    std::string refused;
    size_t      refused_beside = 0;  // bytes
    std::string broken;              // why it will never be used; empty when nothing is known against it
};

// A kernel bound to operands.
struct neuron_bound_launch {
    neuron_model *          model  = nullptr;
    nrt_tensor_set_t *      input  = nullptr;
    nrt_tensor_set_t *      output = nullptr;
    std::vector<neuron_use> uses;  // of the memory that it is bound to
};

struct neuron_core {
    neuron_core(const neuron_nrt & nrt, int vnc);
    neuron_core(const neuron_core &) = delete;

    const neuron_nrt & nrt;
    const int          vnc;
    std::mutex         mutex;

    // Held, before the other one, by who plans and launches a graph: while that waits with `mutex` let go, bound launches stay.
    std::mutex graph_mutex;

    neuron_launch_queue launch_queue;

    // Grows when bound launches are destroyed and when memory is freed: then pointers to either may be no longer good.
    uint64_t epoch = 1;

    // Initializes libnrt, which claims the process's cores. Returns false, and reports why, when that fails.
    bool open();

    // Returns memory, or NULL and reports why.
    neuron_memory * allocate(size_t size);
    void            free(neuron_memory * memory);
    void            free_locked(neuron_memory * memory);

    // locked. Returns memory for what the core can do without, or NULL when that would leave too little: a sixteenth of the core's
    // memory stays free beside that of the bundles' programs.
    neuron_memory * allocate_spare(size_t size, const neuron_programs & all);

    // Sets both to 0 when the library does not tell. What is free is less what the programs of all bundles, as far as they are not loaded
    // yet, will take: what the bundles say, times how much more the loaded ones took than their bundles say. A program of
    // which no bundle says anything counts as the average of those that were loaded.
    void memory_stats(const neuron_programs & all, size_t * free, size_t * total);

    // Loads what is not loaded yet of some kernels' NEFFs until the memory is full: nothing is unloaded for it. A line says so when it
    // takes long on a device. What fails is reported, and tried again when it is bound.
    void preload(const std::vector<neuron_kernel> & kernels);

    // Reads the NEFF of a program with collectives, which is empty when it is loaded. Returns false, and reports why, when it is broken.
    bool read_collective(const neuron_kernel & kernel, std::vector<uint8_t> & neff);

    // Loads a program with collectives as one of several ranks. Returns when all have called it, each from a thread of its own, or false
    // when that fails, which it reports.
    bool load_collective(const neuron_kernel &        kernel,
                         const std::vector<uint8_t> & neff,
                         uint32_t                     rank,
                         uint32_t                     n_ranks);

    // Returns whether the kernel's NEFF was tried and will never be used.
    bool is_broken(const neuron_kernel & kernel);
    bool is_broken_locked(const neuron_kernel & kernel) const;

    // locked. Returns whether a plan has to do without the kernel: it is broken, or does not fit beside the core's tensors. Either is
    // found out when its program is loaded, and may be after it was unloaded to make room.
    bool is_unusable(const neuron_kernel & kernel) const;

    // Gives back what the core has for itself: loaded models, bound kernels and scratch memory.
    void release();

    // locked. Returns scratch memory of at least this size, or NULL and reports why. What was in it is lost when it grows.
    neuron_memory * scratch(size_t size);

    // locked. Returns where the core has numbers that kernels are given, or memory NULL and sets `message`. Nothing else is ever written
    // there, so that launches in flight keep theirs, and equal numbers are there once.
    neuron_operand numbers(const std::vector<float> & values, std::string & message);

    // locked. Returns the kernel bound to operands. Equal arguments give the same bound launch. NULL when it can't be: `message` says
    // why, empty when the core has said that memory is missing, and `broken` whether it never will be, or not before memory is freed, after which every plan is made again.
    neuron_bound_launch * bind(const neuron_kernel &  kernel,
                               const neuron_binding & binding,
                               std::string &          message,
                               bool &                 broken);

    // locked. Launches a kernel, whose model is loaded again if it had to make room; reports why that fails. `node` is what
    // it computes. Waits, with the mutex let go, while as many launches are in flight as may be; behind jobs it becomes one. Returns what
    // an earlier launch of the stream came to if that failed.
    NRT_STATUS execute(neuron_bound_launch & bound_launch, neuron_stream & stream, const char * node);

    // locked. Writes what is staged for any memory, as is to be done before a graph is launched.
    NRT_STATUS write_staged();

    // locked. Does work that uses some memory, or makes it a job behind other jobs.
    NRT_STATUS in_order(neuron_stream & stream, std::vector<neuron_use> uses, const neuron_work & work);

    // locked. Writes and copies within the core's memory in order with a stream's launches. Data may change when it returns.
    NRT_STATUS write(neuron_stream & stream, const neuron_operand & to, const void * data);
    NRT_STATUS copy(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to);

    // locked. Waits for the stream's launches; returns, and takes back, what the first that failed came to, which the caller of the graph
    // that is launched is told.
    NRT_STATUS finish(neuron_stream & stream);

    // locked. Copies within the core's memory. A job waits for what is before it: `before` is its number.
    NRT_STATUS copy(const neuron_operand & from, const neuron_operand & to, uint64_t before = NEURON_LAST);

    // Has a stream wait for what another core was given up to a number. Returns at once.
    void wait_for(neuron_stream & stream, neuron_core & other, uint64_t number);

    // Copies from the memory of another core, when that has been computed, in order with a stream's launches. Returns at once.
    void copy_from(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to);

  private:
    NRT_STATUS            try_launch(neuron_bound_launch & bound_launch,
                                     neuron_stream &       stream,
                                     uint64_t              graph,
                                     uint64_t              number,
                                     const std::string &   node);
    std::vector<uint64_t> ids_of_staged() const;
    NRT_STATUS            load(neuron_model & model, std::string & message, bool make_room = true);
    bool                  is_refused(const neuron_model & model) const;
    bool                  is_unusable(const neuron_model & model) const;
    bool                  read_neff(neuron_model & model, std::vector<uint8_t> & neff, std::string & message);
    bool                  stats(nrt_vnc_memory_stats_t & stats) const;
    size_t                used() const;
    void                  note_size(neuron_model & model, size_t before);
    size_t                program_size() const;
    size_t                missing_programs(const neuron_programs & all) const;
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
    std::map<std::vector<uint32_t>, neuron_operand> kept_numbers;    // by their bits
    std::vector<neuron_memory *>                    numbers_memory;  // the last one has room from `numbers_end` on
    size_t                                          numbers_end    = 0;
    uint64_t                                        clock          = 0;
    uint64_t                                        next_memory_id = 1;
    size_t                                          tensor_bytes   = 0;      // of all memories
    size_t                                          n_reloads      = 0;
    bool                                            said_full      = false;  // since memory was freed last
    std::atomic<size_t>                             n_loaded{ 0 };
    std::atomic<size_t> n_measured{ 0 };       // programs whose size was seen when they were loaded
    std::atomic<size_t> measured_bytes{ 0 };   // of these
    std::atomic<size_t> compared_bytes{ 0 };   // of those of which the bundle says it, too
    std::atomic<size_t> stated_bytes{ 0 };     // what bundles say of the latter
    std::atomic<size_t> loaded_bytes{ 0 };     // what bundles say of the programs that are loaded
    std::atomic<size_t> loaded_unstated{ 0 };  // of which they do not
    std::atomic<size_t> loaded_pages{ 0 };     // bytes of the scratchpad for them
    std::atomic<bool>   any_broken{ false };
};
