// A reader of JSON, as far as the index of a tree needs one.
//
// It takes what JSON is and nothing else; and no string with a NUL, which no text of a bundle may hold, no object with two members
// of one name, of which readers take one or the other, and nothing that is nested deeper than anything in a bundle.

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
    bool                                      truth = false;  // of a BOOL
    std::string                               text;           // of a STRING, or a NUMBER as it is written
    std::vector<json>                         items;          // of an ARRAY
    std::vector<std::pair<std::string, json>> members;        // of an OBJECT

    // Each returns a member of an object, which must be there and of this kind.
    //
    // Throws `error`: CORRUPT.
    const json &        get(const char * name, kind_t wanted) const;
    bool                boolean(const char * name) const;
    uint64_t            count(const char * name, uint64_t max) const;
    const std::string & string(const char * name) const;
};

// Throws `error`: CORRUPT.
json json_read(std::string_view text);

}  // namespace nk
