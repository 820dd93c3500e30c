// Ranges of tensors, for calls and requests.

#pragma once

#include "../../nrt/nrt_api.h"
#include "faults.h"
#include "runtime.h"
#include "units.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

namespace simulator {

// Checks a range of bytes and returns its tensor; returns null, with the status, if the range is invalid.
std::shared_ptr<nrt_tensor> tensor_range(runtime &            rt,
                                         const nrt_tensor_t * handle,
                                         size_t               offset,
                                         size_t               size,
                                         const char *         where,
                                         NRT_STATUS &         status);

simulator::span span_of(const nrt_tensor & tensor, size_t offset, size_t size, bool written);

// Refuses an access to memory that a request in flight uses: AWS does not document what happens then. `own`: a queue
// that keeps the order of its requests.
NRT_STATUS check_in_flight(const runtime &                      rt,
                           const std::vector<simulator::span> & spans,
                           const simulator::unit *              own,
                           const char *                         where);

// Counts a copy or a write of a core's memory.
void count_transfer(runtime & rt, const nrt_tensor & written, bool queued);

// A copy between two tensors.
struct copying {
    std::shared_ptr<nrt_tensor> source;
    std::shared_ptr<nrt_tensor> destination;
    size_t                      source_offset      = 0;
    size_t                      destination_offset = 0;
    size_t                      size               = 0;

    std::vector<simulator::span> spans() const {
        return { span_of(*source, source_offset, size, false), span_of(*destination, destination_offset, size, true) };
    }

    NRT_STATUS run(runtime & rt) const {
        const size_t copied = rt.faults.strikes("copies") ? size / 2 : size;
        memmove(destination->data() + destination_offset, source->data() + source_offset, copied);
        return NRT_SUCCESS;
    }
};

NRT_STATUS prepare_copy(runtime &            rt,
                        const nrt_tensor_t * source,
                        size_t               source_offset,
                        const nrt_tensor_t * destination,
                        size_t               destination_offset,
                        size_t               size,
                        const char *         where,
                        copying &            out);

}  // namespace simulator
