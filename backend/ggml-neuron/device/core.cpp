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
    std::lock_guard<std::mutex> lock(mutex);
    launch_queue.wait_for_all();
    if (n_loaded) {
        NEURON_LOG("core %d: %zu programs are loaded\n", vnc, n_loaded.load());
    }
    if (launch_queue.is_queue() && launch_queue.queued()) {
        NEURON_LOG("core %d: %llu launches, %llu of them while another one was in flight\n", vnc,
                   (unsigned long long) launch_queue.queued(), (unsigned long long) launch_queue.overlapping());
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
    const NRT_STATUS status       = launch_queue.launch(bound_launch, stream, node);
    if (status == NRT_QUEUE_FULL) {
        launch_queue.wait_for_queue();
    }
    return status;
}

NRT_STATUS neuron_core::execute(neuron_bound_launch & bound_launch, neuron_stream & stream, const char * node) {
    NRT_STATUS status = NRT_QUEUE_FULL;
    while (status == NRT_QUEUE_FULL) {
        status = try_launch(bound_launch, stream, node);
    }
    return status;
}

NRT_STATUS neuron_core::write(neuron_stream & stream, const neuron_operand & to, std::vector<uint8_t> data) {
    if (!launch_queue.queues_transfers() || data.empty()) {
        return to.memory->write_locked(data.data(), to.offset, data.size());
    }
    const NRT_STATUS status = to.memory->write_staged();
    if (status != NRT_SUCCESS) {
        return status;
    }
    g_metrics.traffic.add_write(data.size());
    return launch_queue.write(std::move(data), to, stream);
}

NRT_STATUS neuron_core::copy(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to) {
    if (!launch_queue.queues_transfers()) {
        return copy(from, to);
    }
    for (neuron_memory * memory : { from.memory, to.memory }) {
        const NRT_STATUS status = memory->write_staged();
        if (status != NRT_SUCCESS) {
            return status;
        }
    }
    return launch_queue.copy(from, to, stream);
}

void neuron_core::copy_from(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to) {
    std::vector<uint8_t> data(from.size);
    neuron_core &        other = *from.memory->core;
    NRT_STATUS           status;
    {
        const std::lock_guard<std::mutex> lock(other.mutex);
        status = from.memory->read_locked(data.data(), from.offset, from.size);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (status == NRT_SUCCESS) {
        status = to.memory->write_locked(data.data(), to.offset, from.size);
    }
    if (status != NRT_SUCCESS) {
        launch_queue.poison(
            {
                { to.memory, to.offset, from.size, true }
        },
            stream, stream.graph, status);
    }
}

NRT_STATUS neuron_core::finish(neuron_stream & stream) {
    launch_queue.wait_for(stream);
    const NRT_STATUS status = stream.failed;
    stream.failed           = NRT_SUCCESS;
    launch_queue.forget_poisoned(stream);
    return status;
}
