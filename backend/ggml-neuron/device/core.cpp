#include "device/core.h"

#include "report/log.h"
#include "report/metrics.h"

#include <string>
#include <utility>
#include <vector>

neuron_core::neuron_core(const neuron_nrt & nrt, int vnc) :
    nrt(nrt), vnc(vnc), launch_queue(nrt, vnc, mutex), page(neuron_scratchpad_page(nrt)) {}

bool neuron_core::open() {
    const std::string & failure = nrt.init();
    if (!failure.empty()) {
        NEURON_ERROR("core %d: %s\n", vnc, failure.c_str());
    }
    return failure.empty();
}

void neuron_core::release() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        launch_queue.wait_for_all();
    }
    launch_queue.stop();
    std::lock_guard<std::mutex> lock(mutex);
    if (n_loaded) {
        NEURON_LOG("core %d: %zu programs are loaded\n", vnc, n_loaded.load());
    }
    if (launch_queue.is_queue() && launch_queue.queued()) {
        NEURON_LOG("core %d: %llu launches, %llu of them while another one was in flight\n", vnc,
                   (unsigned long long) launch_queue.queued(), (unsigned long long) launch_queue.overlapping());
    }
    if (launch_queue.jobs_done()) {
        NEURON_LOG("core %d: %llu jobs waited for another core\n", vnc, (unsigned long long) launch_queue.jobs_done());
    }
    destroy_all_bound_launches();
    for (auto & entry : models) {
        neuron_model & model = *entry.second;
        if (model.handle) {
            unload(model);
        }
        if (model.spare) {
            free_locked(model.spare);
            model.spare = nullptr;
        }
    }
    free_numbers();
    if (scratch_memory) {
        free_locked(scratch_memory);
        scratch_memory = nullptr;
    }
}

// Returns NRT_QUEUE_FULL when it unlocked the mutex: the caller tries again.
NRT_STATUS neuron_core::try_launch(neuron_bound_launch & bound_launch,
                                   neuron_stream &       stream,
                                   uint64_t              graph,
                                   uint64_t              number,
                                   const std::string &   node) {
    if (launch_queue.is_full()) {
        launch_queue.wait_for_first();
        return NRT_QUEUE_FULL;
    }
    if (launch_queue.wait_for_transfer(bound_launch.uses)) {
        return NRT_QUEUE_FULL;
    }
    if (stream.failed != NRT_SUCCESS) {
        return stream.failed;
    }
    if (!bound_launch.model->handle) {
        std::string      message;
        const NRT_STATUS status = load(*bound_launch.model, message);
        epoch += status != NRT_SUCCESS;                          // plans with the program are made again
        return status == NRT_SUCCESS ? NRT_QUEUE_FULL : status;  // loading may have unlocked the mutex
    }
    bound_launch.model->last_used = ++clock;
    const NRT_STATUS status       = launch_queue.launch(bound_launch, stream, graph, number, node);
    if (status == NRT_QUEUE_FULL) {
        launch_queue.wait_for_queue();
    }
    return status;
}

NRT_STATUS neuron_core::execute(neuron_bound_launch & bound_launch, neuron_stream & stream, const char * node) {
    const auto launch = [this, &bound_launch, &stream, graph = stream.graph,
                         node = std::string(node)](uint64_t number) {
        return try_launch(bound_launch, stream, graph, number, node);
    };
    NRT_STATUS status = NRT_QUEUE_FULL;
    while (status == NRT_QUEUE_FULL && !launch_queue.must_queue(bound_launch.uses)) {
        status = launch(NEURON_LAST);
    }
    if (status != NRT_QUEUE_FULL) {
        return status;
    }
    launch_queue.queue(stream, bound_launch.uses, [launch](uint64_t number) {
        NRT_STATUS status = NRT_QUEUE_FULL;
        while (status == NRT_QUEUE_FULL) {
            status = launch(number);
        }
        return status;
    });
    return NRT_SUCCESS;
}

NRT_STATUS neuron_core::in_order(neuron_stream & stream, std::vector<neuron_use> uses, neuron_work work) {
    if (!launch_queue.must_queue(uses)) {
        return work(NEURON_LAST);
    }
    launch_queue.queue(stream, std::move(uses), std::move(work));
    return NRT_SUCCESS;
}

NRT_STATUS neuron_core::write(neuron_stream & stream, const neuron_operand & to, std::vector<uint8_t> data) {
    return in_order(stream,
                    {
                        { to.memory, to.offset, data.size(), true }
    },
                    [this, &stream, graph = stream.graph, to, data = std::move(data)](uint64_t number) mutable {
                        return write(stream, graph, to, std::move(data), number);
                    });
}

NRT_STATUS neuron_core::write(neuron_stream &        stream,
                              uint64_t               graph,
                              const neuron_operand & to,
                              std::vector<uint8_t>   data,
                              uint64_t               number) {
    if (!launch_queue.queues_transfers() || data.empty()) {
        return to.memory->write_locked(data.data(), to.offset, data.size(), number);
    }
    // staged bytes are later than a job
    const NRT_STATUS status = number == NEURON_LAST ? to.memory->write_staged() : NRT_SUCCESS;
    if (status != NRT_SUCCESS) {
        return status;
    }
    g_metrics.traffic.add_write(data.size());
    return launch_queue.write(std::move(data), to, stream, graph, number);
}

NRT_STATUS neuron_core::copy(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to) {
    return in_order(stream,
                    {
                        { from.memory, from.offset, from.size, false },
                        { to.memory,   to.offset,   from.size, true  }
    },
                    [this, &stream, graph = stream.graph, from, to](uint64_t number) {
                        if (!launch_queue.queues_transfers()) {
                            return copy(from, to, number);
                        }
                        for (neuron_memory * memory : { from.memory, to.memory }) {
                            const NRT_STATUS status = number == NEURON_LAST ? memory->write_staged() : NRT_SUCCESS;
                            if (status != NRT_SUCCESS) {
                                return status;
                            }
                        }
                        return launch_queue.copy(from, to, stream, graph, number);
                    });
}

void neuron_core::wait_for(neuron_stream & stream, neuron_core & other, uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    launch_queue.queue(stream, {}, [this, &other, number](uint64_t) {
        const neuron_unlocked             unlocked(mutex);
        const std::lock_guard<std::mutex> lock(other.mutex);
        other.launch_queue.wait_for(number);
        return NRT_SUCCESS;
    });
}

void neuron_core::copy_from(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to) {
    neuron_core & other = *from.memory->core;
    for (neuron_memory * memory : { from.memory, to.memory }) {  // one after the other: waiting unlocks one mutex
        std::unique_lock<std::mutex> lock(memory->core->mutex);
        const NRT_STATUS             status = memory->write_staged();
        if (status != NRT_SUCCESS) {
            lock.unlock();
            const std::lock_guard<std::mutex> own(mutex);
            stream.failed = status;
            return;
        }
    }
    const std::scoped_lock both(mutex, other.mutex);
    const uint64_t         fence = other.launch_queue.add_fence({ from.memory, from.offset, from.size, false });
    launch_queue.queue(
        stream,
        {
            { to.memory, to.offset, from.size, true }
    },
        [this, &other, from, to, fence](uint64_t number) {
            std::vector<uint8_t> data(from.size);
            NRT_STATUS           status;
            {
                const neuron_unlocked             unlocked(mutex);
                const std::lock_guard<std::mutex> lock(other.mutex);
                status = from.memory->read_locked(data.data(), from.offset, from.size, fence);
                other.launch_queue.remove_fence(fence);
            }
            return status != NRT_SUCCESS ? status : to.memory->write_locked(data.data(), to.offset, from.size, number);
        });
}

NRT_STATUS neuron_core::finish(neuron_stream & stream) {
    launch_queue.wait_for(stream);
    const NRT_STATUS status = stream.failed;
    stream.failed           = NRT_SUCCESS;
    launch_queue.forget_poisoned(stream);
    return status;
}
