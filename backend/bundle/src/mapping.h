// A file that is mapped into memory, read-only.

#pragma once

#include <cstddef>
#include <cstdint>

namespace nk {

// The file stays mapped during the object's lifetime.
class mapping {
  public:
    mapping() = default;

    // Throws `error`: IO.
    explicit mapping(const char * path);

    mapping(mapping && other) noexcept { *this = static_cast<mapping &&>(other); }

    mapping & operator=(mapping && other) noexcept;

    ~mapping();

    // NULL for an empty file.
    const uint8_t * data() const { return static_cast<const uint8_t *>(address); }

    size_t size() const { return length; }

    // Copies bytes of the file in its current state, which may differ from the mapped one. Never ends in a signal.
    //
    // Throws `error`: IO when the file can't be read, CORRUPT when the file is shorter now.
    void read(size_t offset, void * out, size_t n) const;

    // Returns a number that is another one after each change of the file. 1 without a file. 0 if the file has changed within
    // the last second: the clock of changes may not tell the next one from that.
    int64_t state() const;

  private:
    int    file    = -1;  // open for `read`
    void * address = nullptr;
    size_t length  = 0;
};

}  // namespace nk
