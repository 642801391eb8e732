# The two Python extensions: _core (C, limited API) and _torch (C++, torch's
# stable ABI).  Included by CMakeLists.txt.
if(NOT PERSIA_PYTHON)
    set(venv "${CMAKE_SOURCE_DIR}/../.venv/bin/python")
    if(EXISTS "${venv}")
        set(PERSIA_PYTHON "${venv}")
    else()
        find_program(PERSIA_PYTHON3 NAMES python3 REQUIRED)
        set(PERSIA_PYTHON "${PERSIA_PYTHON3}")
    endif()
endif()

# Sets `out` to what the Python expression prints.
function(ask_python out code)
    execute_process(COMMAND "${PERSIA_PYTHON}" -c "${code}"
        OUTPUT_VARIABLE answer ERROR_VARIABLE error RESULT_VARIABLE rc
        OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT rc EQUAL 0)
        message(FATAL_ERROR "${PERSIA_PYTHON} failed on: ${code}\n${error}")
    endif()
    set(${out} "${answer}" PARENT_SCOPE)
endfunction()

# A module of the package: finds libpersia.so beside itself.
function(add_extension target name)
    add_library(${target} MODULE ${ARGN})
    set_target_properties(${target} PROPERTIES
        PREFIX "" OUTPUT_NAME "${name}" SUFFIX ".so"
        LIBRARY_OUTPUT_DIRECTORY "${output}"
        BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
    target_link_libraries(${target} PRIVATE persia_strict persia)
    add_dependencies(libraries ${target})
endfunction()

file(GLOB py_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/py/*.c")
ask_python(py_include
    "import sysconfig; print(sysconfig.get_path('include'))")
add_extension(core "_core.abi3" ${py_sources})
target_link_libraries(core PRIVATE persia_data)
target_compile_definitions(core PRIVATE Py_LIMITED_API=0x030B0000)
target_include_directories(core SYSTEM PRIVATE "${py_include}")

file(GLOB torch_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/torch/*.cpp")
enable_language(CXX)
# Found without importing torch, which would take seconds.
ask_python(torch_dir
"import importlib.util as u
print(u.find_spec('torch').submodule_search_locations[0])")
add_extension(torch_ops "_torch" ${torch_sources})
set_target_properties(torch_ops PROPERTIES
    CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF)
# Torch's stable ABI of 2.10: the binary serves later releases too.
target_compile_definitions(torch_ops PRIVATE
    TORCH_TARGET_VERSION=0x020a000000000000)
target_include_directories(torch_ops SYSTEM PRIVATE
    "${torch_dir}/include"
    "${torch_dir}/include/torch/csrc/api/include")
target_link_directories(torch_ops PRIVATE "${torch_dir}/lib")
target_link_libraries(torch_ops PRIVATE torch_cpu c10)
