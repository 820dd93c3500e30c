// Kernels bound to memory of a NeuronCore.

#include "device/core.h"
#include "report/log.h"

#include <algorithm>

// The most bound launches. Each has two tensor sets in the library; a graph of a large model has about a thousand.
static constexpr size_t MAX_BOUND_LAUNCHES = 1 << 16;

void neuron_core::destroy(neuron_bound_launch & bound_launch) {
    if (bound_launch.input) {
        nrt.nrt_destroy_tensor_set(&bound_launch.input);
    }
    if (bound_launch.output) {
        nrt.nrt_destroy_tensor_set(&bound_launch.output);
    }
}

template <typename F> void neuron_core::destroy_bound_launches(F which) {
    bool any = false;
    for (auto it = bound_launches.begin(); it != bound_launches.end();) {
        if (which(it->first)) {
            destroy(*it->second);
            it  = bound_launches.erase(it);
            any = true;
        } else {
            ++it;
        }
    }
    epoch += any;
}

void neuron_core::destroy_all_bound_launches() {
    destroy_bound_launches([](const std::vector<uint64_t> &) { return true; });
}

// A bound launch's key holds the id of each memory of its operands: see bound_launch_key.
void neuron_core::destroy_bound_launches_of(uint64_t memory) {
    destroy_bound_launches([memory](const std::vector<uint64_t> & key) {
        for (size_t i = 2; i < key.size(); i += 3) {
            if (key[i] == memory) {
                return true;
            }
        }
        return false;
    });
}

void neuron_core::destroy_bound_launches_and_slices() {
    launch_queue.wait_for_all();
    destroy_all_bound_launches();
    for (auto & entry : memories) {
        for (auto & slice : entry.second->slices) {
            nrt.nrt_tensor_free(&slice.second);
        }
        entry.second->slices.clear();
    }
}

// Returns a bound launch's key: the NEFF, the numbers of sources and results, and each operand's memory, offset and
// size. The NEFF stands for the kernel, because equal NEFFs compute the same.
static std::vector<uint64_t> bound_launch_key(const neuron_kernel & kernel, const neuron_binding & binding) {
    std::vector<uint64_t> key;
    key.reserve(2 + 3 * binding.size());
    key.push_back(kernel.neff_number());
    key.push_back(binding.n_src | (uint64_t) binding.n_results << 32);
    for (size_t i = 0; i < binding.size(); i++) {
        const neuron_operand & operand = binding.operands[i];
        key.push_back(operand.memory ? operand.memory->id : 0);
        key.push_back(operand.offset);
        key.push_back(operand.size);
    }
    return key;
}

// Returns the index of the operand for a model's tensor, or the index behind the last one.
static size_t operand_of(const neuron_model::tensor & tensor, const neuron_binding & binding) {
    const size_t n = tensor.result ? binding.n_results : binding.n_src;
    return tensor.index < n ? tensor.index + (tensor.result ? binding.n_src : 0) : binding.size();
}

// Returns the disagreement between a NEFF and the bundle's index, or "". They agree when each of the NEFF's tensors is
// an operand of that size, and its outputs include each result and each source that the kernel changes. The NEFF may
// lack inputs: a compiler removes inputs that no result depends on. It may have outputs of the compiler's own.
static std::string disagreement(const neuron_model & model, const neuron_binding & binding) {
    const std::string text = model.name + ": its NEFF disagrees with the bundle's index: ";

    std::vector<std::string> outputs;
    for (size_t i = 0; i < binding.n_results; i++) {
        outputs.push_back("output" + std::to_string(i));
    }
    for (size_t i = 0; i < binding.n_src; i++) {
        if (binding.is_updated(i)) {
            outputs.push_back("input" + std::to_string(i) + ".updated");
        }
    }
    for (const neuron_model::tensor & tensor : model.tensors) {
        if (tensor.is_spare) {
            continue;
        }
        const size_t i          = operand_of(tensor, binding);
        const bool   is_operand = i < binding.size() && (tensor.result || !tensor.output || binding.is_updated(i));
        const size_t size       = is_operand ? binding.operands[i].size : 0;
        if (size != tensor.size) {
            return text + tensor.name + " has " + std::to_string(tensor.size) + " bytes and the index says " +
                   std::to_string(size);
        }
        const auto found = std::find(outputs.begin(), outputs.end(), tensor.name);
        if (tensor.output && found != outputs.end()) {
            outputs.erase(found);
        }
    }
    return outputs.empty() ? "" : text + "it lacks " + outputs.front();
}

// Returns the memory uses of a bound kernel. They include sources that the NEFF lacks: freeing their memory destroys
// the bound launch.
static std::vector<neuron_use> uses_of(const neuron_binding & binding) {
    std::vector<neuron_use> uses;
    for (size_t i = 0; i < binding.size(); i++) {
        const neuron_operand & o = binding.operands[i];
        if (!o.memory) {
            continue;
        }
        if (i < binding.n_src) {
            uses.push_back({ o.memory, o.offset, o.size, false });
        }
        if (i >= binding.n_src || binding.is_updated(i)) {
            uses.push_back({ o.memory, o.offset, o.size, true });
        }
    }
    return uses;
}

// Makes the tensor sets of a bound launch. On failure sets `message` and returns false; the bound launch owns the sets
// made so far.
bool neuron_core::fill(neuron_bound_launch & bound_launch, const neuron_binding & binding, std::string & message) {
    const auto failed = [&](const char * function, NRT_STATUS status) {
        message = nrt.describe(function, status) + ": " + bound_launch.model->name;
        return false;
    };
    for (nrt_tensor_set_t ** set : { &bound_launch.input, &bound_launch.output }) {
        const NRT_STATUS status = nrt.nrt_allocate_tensor_set(set);
        if (status != NRT_SUCCESS) {
            return failed("nrt_allocate_tensor_set", status);
        }
    }
    neuron_model & model = *bound_launch.model;
    if (model.spare_bytes && !model.spare) {
        model.spare = allocate_locked(model.spare_bytes, message);
        if (!model.spare) {
            return false;
        }
    }
    for (const neuron_model::tensor & tensor : model.tensors) {
        const neuron_operand operand = tensor.is_spare ? neuron_operand{ model.spare, tensor.index, tensor.size }
                                                       : binding.operands[operand_of(tensor, binding)];
        nrt_tensor_t *       bound   = slice(*operand.memory, operand.offset, operand.size, message);
        if (!bound) {
            return false;
        }
        const NRT_STATUS status = nrt.nrt_add_tensor_to_tensor_set(
            tensor.output ? bound_launch.output : bound_launch.input, tensor.name.c_str(), bound);
        if (status != NRT_SUCCESS) {
            return failed("nrt_add_tensor_to_tensor_set", status);
        }
    }
    return true;
}

// Loads the model if necessary and makes a bound launch of it. On failure sets `message` and returns NULL.
std::unique_ptr<neuron_bound_launch> neuron_core::make_bound_launch(neuron_model &         model,
                                                                    const neuron_binding & binding,
                                                                    std::string &          message) {
    if (!model.handle && load(model, message) != NRT_SUCCESS) {
        return nullptr;
    }
    message = disagreement(model, binding);
    if (!message.empty()) {
        mark_broken(model, message);
        return nullptr;
    }
    auto bound_launch   = std::make_unique<neuron_bound_launch>();
    bound_launch->model = &model;
    bound_launch->uses  = uses_of(binding);
    if (!fill(*bound_launch, binding, message)) {
        destroy(*bound_launch);
        return nullptr;
    }
    return bound_launch;
}

neuron_bound_launch * neuron_core::bind(const neuron_kernel &  kernel,
                                        const neuron_binding & binding,
                                        std::string &          message,
                                        bool &                 broken) {
    std::vector<uint64_t> key   = bound_launch_key(kernel, binding);
    const auto            found = bound_launches.find(key);
    if (found != bound_launches.end() && !is_unusable(*found->second->model)) {
        return found->second.get();
    }
    if (bound_launches.size() >= MAX_BOUND_LAUNCHES) {
        destroy_bound_launches_and_slices();
    }
    neuron_model & model = model_of(kernel);
    message              = model.broken;
    auto bound_launch    = is_unusable(model) ? nullptr : make_bound_launch(model, binding, message);
    broken               = is_unusable(model);
    if (is_refused(model)) {
        message.clear();
    }
    return bound_launch ? bound_launches.emplace(std::move(key), std::move(bound_launch)).first->second.get() : nullptr;
}
