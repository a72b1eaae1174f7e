#include "penstock/cli/device_transport.h"

#include "penstock/base/text.h"
#include "penstock/cli/checks.h"
#include "penstock/cli/devices.h"
#include "penstock/cli/program/local_ranks.h"
#include "penstock/transport/device_backend.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::internal::cli {
namespace {

DeviceTransport transport_of(const std::string& text) {
  if (text == "direct") return DeviceTransport::Direct;
  return text == "staged" ? DeviceTransport::Staged : DeviceTransport::Auto;
}

void print_choice(DeviceTransport chosen, const std::string& reason) {
  if (chosen == DeviceTransport::Direct) return print_notice("tensors on devices are sent from device to device.");
  // The hint is for those who want another way: --device-transport direct prints it.
  const std::string why = reason.substr(0, reason.find('\n'));
  print_notice(concat("tensors on devices are staged in CPU memory", why.empty() ? "." : concat(", as ", why)));
}

}  // namespace

void DeviceTransportOption::add_to(CLI::App& command) {
  command
      .add_option(
          "--device-transport", text,
          "How process ranks send tensors on devices: from device to device (direct), through CPU memory (staged), or "
          "direct if all ranks can and each has a device of its own, otherwise staged (auto)")
      ->option_text("auto|direct|staged [auto]")
      ->check(one_of({"auto", "direct", "staged"}));
}

void DeviceTransportOption::require_possible(const DeviceList& devices, bool are_process_ranks) const {
  if (text != "direct") return;
  if (devices.is_cpu()) {
    throw DeviceError(
        "--device-transport direct sends tensors from device to device; found ranks on the CPU.\n"
        "  Hint: choose devices with --device, or leave --device-transport out.");
  }
  if (!are_process_ranks) {
    throw DeviceError(
        "--device-transport direct is for process ranks; found thread ranks.\n"
        "  Hint: start process ranks with --transport gloo, or leave --device-transport out: thread ranks never send "
        "tensors through CPU memory.");
  }
}

C10dOptions DeviceTransportOption::options(const DeviceList& devices) const {
  C10dOptions options;
  if (devices.is_cpu()) return options;
  options.device_transport = transport_of(text);
  if (options.device_transport != DeviceTransport::Staged) {
    const at::Device device = devices.devices().front();
    options.device_backends = device.is_privateuseone() ? simulated_device_backends(device) : device_backends(device);
  }
  if (read_environment().rank == 0) options.on_device_transport = print_choice;
  return options;
}

}  // namespace penstock::internal::cli
