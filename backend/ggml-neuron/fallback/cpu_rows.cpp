#include "fallback/cpu_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

// The largest gap between ranges that is moved with them: a further transfer takes longer.
constexpr size_t MAX_GAP = (size_t) 64 << 10;

// Rows that are moved together. Addresses are in the tensor.
struct range {
    const char * begin;
    const char * end;
    size_t       filled;  // bytes of rows in it, counted for each write
};

}  // namespace

std::vector<neuron_bytes> neuron_bytes_of(const ggml_tensor * t) {
    const auto data = (const char *) t->data;
    size_t     size = ggml_row_size(t->type, t->ne[0]);
    if (t->nb[0] != ggml_type_size(t->type)) {  // transposed: a row's elements are not contiguous
        size = (size_t) (t->ne[0] - 1) * t->nb[0] + ggml_type_size(t->type);
    }
    std::vector<int> dims = { 1, 2, 3 };
    std::sort(dims.begin(), dims.end(), [t](int a, int b) { return t->nb[a] < t->nb[b]; });
    std::vector<size_t> begins = { 0 };
    for (const int d : dims) {
        const auto n = (size_t) t->ne[d];
        if (begins.size() == 1 && t->nb[d] <= size + MAX_GAP) {
            size += (n - 1) * t->nb[d];
            continue;
        }
        const std::vector<size_t> inner = begins;
        for (size_t i = 1; i < n; i++) {
            for (const size_t begin : inner) {
                begins.push_back(begin + i * t->nb[d]);
            }
        }
    }
    std::vector<neuron_bytes> bytes;
    for (const size_t begin : begins) {
        bytes.push_back({ data + begin, data + begin + size });
    }
    return neuron_unite(std::move(bytes));
}

std::vector<neuron_bytes> neuron_unite(std::vector<neuron_bytes> bytes) {
    std::sort(bytes.begin(), bytes.end(),
              [](const neuron_bytes & a, const neuron_bytes & b) { return a.begin < b.begin; });
    std::vector<neuron_bytes> united;
    for (const neuron_bytes & b : bytes) {
        if (united.empty() || b.begin > united.back().end + MAX_GAP) {
            united.push_back(b);
        } else {
            united.back().end = std::max(united.back().end, b.end);
        }
    }
    return united;
}

// Returns the row number in an element of an id tensor.
static int64_t id_at(const ggml_tensor * index, const char * ids, int64_t i0, int64_t i1, int64_t i2) {
    const char * id = ids + i0 * (int64_t) index->nb[0] + i1 * (int64_t) index->nb[1] + i2 * (int64_t) index->nb[2];
    if (index->type == GGML_TYPE_I64) {
        int64_t row;
        memcpy(&row, id, sizeof(row));
        return row;
    }
    int32_t row;
    memcpy(&row, id, sizeof(row));
    return row;
}

bool neuron_read_rows(const ggml_tensor *        node,
                      const void *               ids,
                      std::vector<uint8_t> &     rows,
                      const neuron_host_access & access) {
    const ggml_tensor *       from  = node->src[0];
    const ggml_tensor *       index = node->src[1];
    const size_t              size  = ggml_row_size(from->type, from->ne[0]);
    std::vector<neuron_bytes> places;
    for (int64_t i2 = 0; i2 < index->ne[2]; i2++) {
        for (int64_t i1 = 0; i1 < index->ne[1]; i1++) {
            for (int64_t i0 = 0; i0 < index->ne[0]; i0++) {
                const int64_t row = id_at(index, (const char *) ids, i0, i1, i2);
                if (row < 0 || row >= from->ne[1]) {
                    return false;
                }
                const char * place = (const char *) from->data + row * (int64_t) from->nb[1] +
                                     i1 * (int64_t) from->nb[2] + i2 * (int64_t) from->nb[3];
                places.push_back({ place, place + size });
            }
        }
    }
    rows.resize(places.size() * size);
    std::vector<uint8_t> data;
    for (const neuron_bytes & b : neuron_unite(places)) {
        data.resize((size_t) (b.end - b.begin));
        if (!access.read(from, b.begin, data.data(), data.size())) {
            return false;
        }
        for (size_t i = 0; i < places.size(); i++) {
            if (places[i].begin >= b.begin && places[i].begin < b.end) {
                memcpy(rows.data() + i * size, data.data() + (places[i].begin - b.begin), size);
            }
        }
    }
    return true;
}

// Calls a function with the number of each row of the source, in order, and its destination's address. Returns false
// when an id is out of range.
template <typename F> static bool for_each_row(const ggml_tensor * node, const char * ids, F function) {
    const ggml_tensor * from  = node->src[0];
    const ggml_tensor * index = node->src[1];
    size_t              n     = 0;
    for (int64_t i3 = 0; i3 < from->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < from->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < from->ne[1]; i1++) {
                const int64_t row = id_at(index, ids, i1, i2 % index->ne[1], i3 % index->ne[2]);
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

// Returns the ranges of rows of a size, ascending.
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
        for (size_t i = 0; i < places.size(); i++) {  // in order: of two rows for one place, the last one counts
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
