// A reader of JSON for the index of a tree.
//
// It accepts standard JSON only. It also rejects a string with a NUL, which no text of a bundle may hold; an object
// with two members of the same name, because readers differ in which one they take; and deeper nesting than any bundle
// has.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nk {

struct json {
    enum kind_t { NOTHING, BOOL, NUMBER, STRING, ARRAY, OBJECT };

    kind_t                                    kind  = NOTHING;
    size_t                                    at    = 0;      // byte in the text, for messages
    bool                                      truth = false;  // value of a BOOL
    std::string                               text;           // value of a STRING, or digits of a NUMBER as written
    std::vector<json>                         items;          // items of an ARRAY
    std::vector<std::pair<std::string, json>> members;        // members of an OBJECT

    // Each returns a member of an object.
    //
    // Throws `error` with CORRUPT when the member is missing or has another kind.
    const json &        get(const char * name, kind_t wanted) const;
    bool                boolean(const char * name) const;
    uint64_t            count(const char * name, uint64_t max) const;
    const std::string & string(const char * name) const;
};

// Throws `error`: CORRUPT.
json json_read(std::string_view text);

}  // namespace nk
