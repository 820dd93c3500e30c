#include "split_devices.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace {

// Nothing reads or writes at this address.
void * const BASE      = (void *) 0x1000;
const size_t ALIGNMENT = 128;
// Larger than any tensor: a buffer of these devices can have any size.
const size_t SIZE      = (size_t) 1 << 46;

struct fake_device {
    std::string                     name;
    struct ggml_backend_device      device      = {};
    struct ggml_backend_buffer_type buffer_type = {};
};

std::vector<std::vector<device_step>> recorded;

fake_device & fake(ggml_backend_dev_t dev) {
    return *(fake_device *) dev->context;
}

//
// memory
//

void do_not_set(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}

void do_not_get(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t) {}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_i buffer = {};
    buffer.get_base              = [](ggml_backend_buffer_t) {
        return BASE;
    };
    buffer.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {
    };
    buffer.set_tensor = do_not_set;
    buffer.get_tensor = do_not_get;
    buffer.clear      = [](ggml_backend_buffer_t, uint8_t) {
    };
    return ggml_backend_buffer_init(type, buffer, nullptr, size);
}

//
// computing
//

size_t index_of(ggml_backend_t backend) {
    return (size_t) backend->context;
}

ggml_status record_part(ggml_backend_t backend, ggml_cgraph * graph) {
    recorded[index_of(backend)].push_back({ graph, nullptr });
    return GGML_STATUS_SUCCESS;
}

bool record_sum(void * /*communicator*/, ggml_tensor ** tensors) {
    for (size_t j = 0; j < recorded.size(); j++) {
        recorded[j].push_back({ nullptr, tensors[j] });
    }
    return true;
}

void * init_communicator(ggml_backend_t * /*backends*/, size_t n_backends) {
    recorded.resize(n_backends);
    return &recorded;
}

void free_communicator(void * /*communicator*/) {}

void * proc_address(ggml_backend_reg_t /*reg*/, const char * name) {
    if (strcmp(name, "ggml_backend_comm_init") == 0) {
        return (void *) init_communicator;
    }
    if (strcmp(name, "ggml_backend_comm_free") == 0) {
        return (void *) free_communicator;
    }
    if (strcmp(name, "ggml_backend_comm_allreduce_tensor") == 0) {
        return (void *) record_sum;
    }
    return nullptr;
}

std::vector<fake_device *> & devices() {
    static std::vector<fake_device *> made;
    return made;
}

ggml_backend_reg_t registry() {
    static ggml_backend_reg reg = {
        GGML_BACKEND_API_VERSION,
        { [](ggml_backend_reg_t) { return "Neuron"; }, [](ggml_backend_reg_t) { return devices().size(); },
          [](ggml_backend_reg_t, size_t i) -> ggml_backend_dev_t { return &devices()[i]->device; }, proc_address },
        nullptr,
    };
    return &reg;
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char * /*params*/) {
    static ggml_guid guid    = { 0x6e, 0x6b, 0x67, 0x01 };
    ggml_backend_i   backend = {};
    backend.get_name         = [](ggml_backend_t b) {
        return fake(b->device).name.c_str();
    };
    backend.free = [](ggml_backend_t b) {
        delete b;
    };
    backend.graph_compute = record_part;
    size_t index          = 0;
    while (&devices()[index]->device != dev) {
        index++;
    }
    return new ggml_backend{ &guid, backend, dev, (void *) index };
}

fake_device * new_device(size_t index) {
    auto * made                    = new fake_device;
    made->name                     = "Neuron" + std::to_string(index);
    made->device.reg               = registry();
    made->device.context           = made;
    ggml_backend_device_i & device = made->device.iface;
    device.get_name                = [](ggml_backend_dev_t d) {
        return fake(d).name.c_str();
    };
    device.get_description = device.get_name;
    device.get_memory      = [](ggml_backend_dev_t, size_t * free, size_t * total) {
        *free = *total = SIZE;
    };
    device.get_type = [](ggml_backend_dev_t) {
        return GGML_BACKEND_DEVICE_TYPE_GPU;
    };
    device.get_props = [](ggml_backend_dev_t d, ggml_backend_dev_props * props) {
        *props              = {};
        props->name         = fake(d).name.c_str();
        props->description  = props->name;
        props->memory_free  = SIZE;
        props->memory_total = SIZE;
        props->type         = GGML_BACKEND_DEVICE_TYPE_GPU;
    };
    device.init_backend    = init_backend;
    device.get_buffer_type = [](ggml_backend_dev_t d) {
        return &fake(d).buffer_type;
    };
    device.supports_op = [](ggml_backend_dev_t, const ggml_tensor *) {
        return true;
    };
    device.supports_buft = [](ggml_backend_dev_t d, ggml_backend_buffer_type_t t) {
        return t == &fake(d).buffer_type;
    };
    made->buffer_type.device         = &made->device;
    made->buffer_type.context        = made;
    made->buffer_type.iface.get_name = [](ggml_backend_buffer_type_t t) {
        return ((fake_device *) t->context)->name.c_str();
    };
    made->buffer_type.iface.alloc_buffer  = alloc_buffer;
    made->buffer_type.iface.get_alignment = [](ggml_backend_buffer_type_t) {
        return ALIGNMENT;
    };
    return made;
}

bool is_view_op(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
           op == GGML_OP_TRANSPOSE;
}

}  // namespace

ggml_backend_dev_t * split_devices(size_t count) {
    static std::vector<ggml_backend_dev_t> listed;
    listed.clear();
    while (devices().size() < count) {
        devices().push_back(new_device(devices().size()));
    }
    for (size_t i = 0; i < count; i++) {
        listed.push_back(&devices()[i]->device);
    }
    listed.push_back(nullptr);
    return listed.data();
}

const char * role_on_device(const ggml_tensor * t) {
    if (t->flags & GGML_TENSOR_FLAG_OUTPUT) {
        return "output";
    }
    if (t->op != GGML_OP_NONE || t->view_src) {
        return nullptr;
    }
    switch (ggml_backend_buffer_get_usage(t->buffer)) {
        case GGML_BACKEND_BUFFER_USAGE_WEIGHTS:
            return "weight";
        case GGML_BACKEND_BUFFER_USAGE_COMPUTE:
            return "input";
        default:
            return "cache";
    }
}

// Allocates a tensor and its sources in the order that llama.cpp's meta backend requires: sources first.
void graph_splitter::place(ggml_backend_sched_t sched, ggml_backend_t meta, ggml_tensor * t) {
    if (!placed.insert(t).second) {
        return;
    }
    if (t->view_src) {
        place(sched, meta, t->view_src);
    }
    for (ggml_tensor * source : t->src) {
        if (source) {
            place(sched, meta, source);
        }
    }
    if (t->view_src) {
        t->buffer = nullptr;
        ggml_backend_view_init(t);
        return;
    }
    const ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(meta);
    // Weights and caches of a model that is loaded without memory have an empty placeholder buffer.
    if (persistent.count(t) || (t->buffer && !t->data && t->buffer->buft == type)) {
        if (persistent.insert(t).second) {
            t->buffer = t->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS ? weights.get() : caches.get();
        }
    } else if (t->buffer && t->data) {
        return;  // it already has memory
    } else {
        ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(sched, t);
        t->buffer              = !backend || backend == meta ? computed.get() : host.get();
    }
    t->data = (char *) (t->buffer == host.get() ? BASE : ggml_backend_buffer_get_base(t->buffer)) + next;
    next += GGML_PAD(ggml_backend_buft_get_alloc_size(type, t), ALIGNMENT);
    if (t->buffer->iface.init_tensor) {
        t->buffer->iface.init_tensor(t->buffer, t);
    }
}

const std::vector<std::vector<device_step>> & graph_splitter::split(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    const ggml_backend_t             meta       = ggml_backend_sched_get_backend(sched, 0);
    const ggml_backend_buffer_type_t type       = ggml_backend_get_default_buffer_type(meta);
    const auto                       new_buffer = [](ggml_backend_buffer_type_t of, ggml_backend_buffer_usage usage) {
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(of, ALIGNMENT);
        ggml_backend_buffer_set_usage(buffer, usage);
        return ggml_backend_buffer_ptr(buffer);
    };
    if (!weights) {
        weights = new_buffer(type, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        caches  = new_buffer(type, GGML_BACKEND_BUFFER_USAGE_ANY);
        host    = new_buffer(ggml_backend_cpu_buffer_type(), GGML_BACKEND_BUFFER_USAGE_ANY);
    }
    computed = new_buffer(type, GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    placed.clear();
    next = 0;
    for (auto & steps : recorded) {
        steps.clear();
    }
    const int n_nodes = ggml_graph_n_nodes(graph);
    int       ranges  = 0;
    for (int begin = 0; begin < n_nodes; begin++) {
        const auto here = [&](int i) {
            return ggml_backend_sched_get_tensor_backend(sched, ggml_graph_node(graph, i)) == meta;
        };
        if (!here(begin)) {
            continue;
        }
        int end = begin;
        while (end < n_nodes && (here(end) || is_view_op(ggml_graph_node(graph, end)->op))) {
            place(sched, meta, ggml_graph_node(graph, end++));
        }
        // In a second range, llama.cpp could reuse memory that the first range has freed, so only one range is supported.
        if (++ranges > 1) {
            throw std::runtime_error("llama.cpp computes '" + std::string(ggml_graph_node(graph, begin - 1)->name) +
                                     "' on the CPU between two parts: tensors can't be split");
        }
        ggml_cgraph part = ggml_graph_view(graph, begin, end);
        if (ggml_backend_graph_compute(meta, &part) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("llama.cpp can't split the graph over the devices");
        }
        begin = end;
    }
    if (ranges == 0) {
        throw std::runtime_error("llama.cpp computes nothing of the graph on the devices");
    }
    return recorded;
}
