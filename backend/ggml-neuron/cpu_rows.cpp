// SET_ROWS on the CPU: of the tensor that rows are written to, a KV cache, no more moves than these rows, or what is between rows that lie
// near each other.

#include "cpu_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

// Bytes between rows that are moved rather than beginning another transfer.
constexpr size_t MAX_GAP = (size_t) 64 << 10;

// Rows that are moved together. Addresses are those of the tensor.
struct range {
    const char * begin;
    const char * end;
    size_t       filled;  // bytes of rows in it, each as often as it is written
};

}  // namespace

// Calls a function with the number of each row of the source, in order, and the address that it goes to; false when an id is of no row.
template <typename F> static bool for_each_row(const ggml_tensor * node, const char * ids, F function) {
    const ggml_tensor * from  = node->src[0];
    const ggml_tensor * index = node->src[1];
    size_t              n     = 0;
    for (int64_t i3 = 0; i3 < from->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < from->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < from->ne[1]; i1++) {
                const char * id  = ids + i1 * (int64_t) index->nb[0] + i2 % index->ne[1] * (int64_t) index->nb[1] +
                                   i3 % index->ne[2] * (int64_t) index->nb[2];
                int64_t      row = 0;
                if (index->type == GGML_TYPE_I64) {
                    memcpy(&row, id, sizeof(row));
                } else {
                    int32_t narrow;
                    memcpy(&narrow, id, sizeof(narrow));
                    row = narrow;
                }
                if (row < 0 || row >= node->ne[1]) {
                    return false;
                }
                function(n++, (const char *) node->data + row * (int64_t) node->nb[1] + i2 * (int64_t) node->nb[2] +
                                  i3 * (int64_t) node->nb[3]);
            }
        }
    }
    return true;
}

// Returns the ranges that rows of a size lie in, ascending.
static std::vector<range> unite(std::vector<const char *> rows, size_t row_size) {
    std::sort(rows.begin(), rows.end());
    std::vector<range> ranges;
    for (const char * row : rows) {
        if (ranges.empty() || row > ranges.back().end + MAX_GAP) {
            ranges.push_back({ row, row + row_size, row_size });
        } else if (row + row_size > ranges.back().end) {
            ranges.back().filled += row >= ranges.back().end ? row_size : 0;
            ranges.back().end = row + row_size;
        }
    }
    return ranges;
}

bool neuron_write_rows(const ggml_tensor *        node,
                       const void *               ids,
                       const void *               rows,
                       const neuron_host_access & access) {
    const size_t              row_size = ggml_row_size(node->type, node->ne[0]);
    std::vector<const char *> places;
    if (!for_each_row(node, (const char *) ids, [&](size_t, const char * place) { places.push_back(place); })) {
        return false;
    }
    std::vector<uint8_t> data;
    for (const range & r : unite(places, row_size)) {
        data.resize((size_t) (r.end - r.begin));
        if (r.filled < data.size() && !access.read(node, r.begin, data.data(), data.size())) {
            return false;
        }
        for (size_t i = 0; i < places.size(); i++) {  // in their order: of two for one place the last one counts
            if (places[i] >= r.begin && places[i] < r.end) {
                memcpy(data.data() + (places[i] - r.begin), (const char *) rows + i * row_size, row_size);
            }
        }
        if (!access.write(node, r.begin, data.data(), data.size())) {
            return false;
        }
    }
    return true;
}
