#include "penstock/schedule/json.h"

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace penstock::internal {
namespace {

using nlohmann::json;

// Builds a document. With a callback, nlohmann's own builder visits all members of an object after each of them, which
// takes quadratic time.
class Builder final : public nlohmann::json_sax<json> {
 public:
  explicit Builder(const JsonVisitor& visit) : visit_(visit) {}

  json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return false; }

  bool start_object(std::size_t /*size*/) override { return open(json::parse_event_t::object_start, json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*size*/) override { return open(json::parse_event_t::array_start, json::array()); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (visit_) visit_(depth(), json::parse_event_t::key, name);
    member_ = &(*open_.back())[name];
    return true;
  }
  bool parse_error(std::size_t /*position*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    throw JsonError("is not JSON: " + std::string(error.what()));
  }

 private:
  int depth() const { return static_cast<int>(open_.size()); }

  json& place(json value) {
    if (open_.empty()) return root_ = std::move(value);
    if (open_.back()->is_array()) return open_.back()->emplace_back(std::move(value));
    return *member_ = std::move(value);
  }
  bool add(json value) {
    const json& placed = place(std::move(value));
    if (visit_) visit_(depth(), json::parse_event_t::value, placed);
    return true;
  }
  bool open(json::parse_event_t event, json empty) {
    if (depth() >= kDeepestJson) throw JsonError("is nested more than " + std::to_string(kDeepestJson) + " deep.");
    if (visit_) visit_(depth(), event, empty);
    open_.push_back(&place(std::move(empty)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const JsonVisitor& visit_;
  json root_;
  // Open arrays and objects, and the next member if the innermost one is an object. A container does not grow while one
  // inside it is open, so the pointers stay valid.
  std::vector<json*> open_;
  json* member_ = nullptr;
};

}  // namespace

json parse_json(std::string_view text, const JsonVisitor& visit) {
  Builder builder(visit);
  json::sax_parse(text, &builder);
  return builder.take();
}

std::optional<json> try_parse_json(std::string_view text) {
  try {
    return parse_json(text);
  } catch (const JsonError&) {
    return std::nullopt;
  }
}

}  // namespace penstock::internal
